"""Rollouts become batches: the loop that schedules work, bounds staleness and relays weights."""
