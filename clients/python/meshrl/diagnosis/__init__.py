"""Finds a run's troubles in its metrics, for `meshrl doctor` and a run's alerts."""
