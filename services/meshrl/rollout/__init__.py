"""The rollout service: a version and a task become rollouts."""
