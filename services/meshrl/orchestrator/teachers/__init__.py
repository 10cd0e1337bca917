"""Logprobs of rollouts' tokens under a teacher or the live policy."""
