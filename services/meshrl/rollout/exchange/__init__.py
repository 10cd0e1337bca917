"""A rollout worker without a reachable address, which dials the orchestrator."""
