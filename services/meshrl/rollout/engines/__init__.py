"""The rollout service as a client of inference engines: routing, calling, reading answers."""
