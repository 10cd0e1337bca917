"""A rollout worker without a reachable address: dials the orchestrator, plays its groups, keeps results until they are
taken."""
