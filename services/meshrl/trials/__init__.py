"""Plays every rollout of a plan once and keeps it in a file; what `eval` and `synthesize` have in common."""
