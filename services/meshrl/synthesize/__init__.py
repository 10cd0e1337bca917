"""The `synthesize` program: makes conversations to fine-tune on from a model's rollouts."""
