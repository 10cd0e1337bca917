"""Rollout workers that dial in: their leases and calls, behind the methods of a RolloutService."""
