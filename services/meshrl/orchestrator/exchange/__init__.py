"""Rollout workers that dial in: their leases and calls, and what makes each look like a RolloutService."""
