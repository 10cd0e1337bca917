"""Hugging Face causal language models: loading, their weights by name, packed attention and token logprobs."""
