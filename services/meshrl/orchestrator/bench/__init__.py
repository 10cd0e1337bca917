"""`orchestrator --bench` with nobody else: what stands in for the other programs, and how it is started."""
