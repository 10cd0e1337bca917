"""Saving a learner and resuming it: shards, Hugging Face folders, random state."""
