"""The rollout service: a version and a task become rollouts; fed by the orchestrator, sampled by inference engines."""
