"""Layers of vLLM's models that are replaced by others."""
