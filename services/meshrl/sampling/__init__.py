"""Samples groups of rollouts at a rollout service and scores them; shared by training, evaluation and synthesis."""
