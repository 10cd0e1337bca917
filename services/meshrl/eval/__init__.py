"""The `eval` program: scores models and checkpoints in environments."""
