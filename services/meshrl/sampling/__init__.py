"""Samples groups of rollouts at rollout services."""
