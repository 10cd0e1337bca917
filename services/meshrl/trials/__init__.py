"""Plays every rollout of a plan once and keeps it in a file; shared by `eval` and `synthesize`."""
