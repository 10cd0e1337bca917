"""How well a trainer uses its device: work of a step, the device's peak, memory at its peak."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from meshrl.models.experts import active_parameters
from meshrl.wire.types import MicroBatch

# Dense peak in FLOP/s at bfloat16 without sparsity, from the makers' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def token_flops(model: PreTrainedModel) -> float:
    """Operations of a token beside attention. Walks the model, which takes tenths of a second."""
    return 4.0 * active_parameters(model) + 2.0 * active_parameters(model, trainable_only=True)


def step_flops(model: PreTrainedModel, micro_batches: Sequence[MicroBatch], a_token: float | None = None) -> float:
    """Operations that forward and backward need, over all micro-batches; `a_token` is `token_flops`.

    A token costs 2 for each of its `active_parameters` forward, 2 for the gradient of what came in, and 2 for the
    parameter's own where it is trained (PaLM, arXiv 2204.02311, appendix B). Attention costs 12 * layers * heads * head
    size a pair of tokens, and half for causality. Checkpointed activations and shared prefixes count once.
    """
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", 0))
    head_dim = int(getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0))
    lengths = np.concatenate([np.diff(row.sample_offsets) for row in micro_batches]).astype(np.float64)
    before = np.concatenate(
        [np.zeros(len(row.rollout_ids)) if row.prefix_tokens is None else row.prefix_tokens for row in micro_batches]
    )
    pairs = float(((before + lengths) ** 2 - before**2).sum())
    attention = 6.0 * int(config.num_hidden_layers) * heads * head_dim * pairs
    return (token_flops(model) if a_token is None else a_token) * float(lengths.sum()) + attention


def peak_flops(device: torch.device) -> float:
    """The data sheet's FLOP/s of a known GPU, else those of a measured float32 product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in PEAK_FLOPS.items():
            if known in name:
                return peak
    size = 512
    left = torch.ones(size, size, device=device)
    best, end = 0.0, time.perf_counter() + 0.05
    while time.perf_counter() < end:
        started = time.perf_counter()
        float((left @ left)[0, 0])  # reading a value waits for the device
        best = max(best, 2.0 * size**3 / (time.perf_counter() - started))
    return best


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far in GiB: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # Linux reports KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
