"""Samples groups of rollouts at rollout services; shared by training, evaluation and synthesis."""
