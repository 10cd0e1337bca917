"""`orchestrator --bench`: the summary of a run's pace, and stand-ins for programs that are not named."""
