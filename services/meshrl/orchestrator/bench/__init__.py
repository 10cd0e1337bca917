"""`orchestrator --bench`: the summary of a run's pace, and stand-ins for the other programs where none is named."""
