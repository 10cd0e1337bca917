"""A policy gradient for the benchmark of stalls that is no number once a file says so."""

from __future__ import annotations

from pathlib import Path

import torch

from meshrl.algorithms.losses import SequenceInputs, SequenceLoss


def loss(inputs: SequenceInputs, *, folder: str) -> SequenceLoss:
    """Importance-weighted policy gradient; not a number where `folder` has the file `nan`."""
    ratio = torch.exp(inputs.logprobs - inputs.inference_logprobs)
    found = -(ratio * inputs.advantages).sum()
    return SequenceLoss(loss=found * float("nan") if (Path(folder) / "nan").exists() else found)
