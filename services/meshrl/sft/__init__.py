"""Supervised fine-tuning: conversations become weights that reinforcement learning can start from."""
