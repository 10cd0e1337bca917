"""The model of most tests of training: a tiny random Qwen3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
FOR_A_GPU = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
"""A shape that the kernels of a GPU take."""


def tiny_qwen3(seed: int = 0, **shape: Any) -> Qwen3ForCausalLM:
    """Of SHAPE, but for the values of `Qwen3Config` that are given."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **shape}))


def save_tiny_qwen3(folder: Path, **shape: Any) -> str:
    """Writes the model of seed 0; returns its folder."""
    tiny_qwen3(**shape).save_pretrained(folder)
    return str(folder)
