"""A rollout worker that nobody can reach: dials the orchestrator, plays what it is given, keeps results until taken."""
