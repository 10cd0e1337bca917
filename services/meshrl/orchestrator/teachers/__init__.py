"""Logprobs of rollouts' tokens under another model (a teacher) or the live policy, for algorithms that need them."""
