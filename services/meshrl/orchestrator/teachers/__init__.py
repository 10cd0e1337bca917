"""Scores of rollouts: what another model, or the live policy, says of their tokens."""
