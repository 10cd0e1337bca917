"""The `synthesize` program: makes conversations to fine-tune on from what a model does in environments."""
