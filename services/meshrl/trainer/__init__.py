"""The trainer program: a batch becomes a new version."""
