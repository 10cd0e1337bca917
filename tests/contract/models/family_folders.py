"""Trains models of several folders for no step and for one, and writes them; in a process alone, or as a torchrun rank.

    family_folders.py BASES RESULTS DEVICE FAMILY...

BASES holds a folder for each family. Rank 0 leaves RESULTS/FAMILY with weights/step_0 and weights/step_1, the version
that would be published before the first step in bfloat16 (published.safetensors), and result.json: how far logprobs in
float32 are from plain transformers' (nats), and the loss of the step; `refused`, where a family is not trained; or
`failed`, where it fails in one process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from meshrl.core.heap import loading

with loading():
    import numpy as np
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from family_checks import SAMPLE_LENGTHS, packed_row, plain_logprobs
    from loss_curves import stream_batch
    from meshrl.algorithms.losses import cross_entropy_loss
    from meshrl.algorithms.objective import Objective
    from meshrl.models.families import attention_implementation
    from meshrl.models.state import gather_state
    from meshrl.training.build import build_learner
    from meshrl.training.checkpoints.checkpointer import Checkpointer
    from meshrl.training.config import OptimConfig
    from meshrl.training.model_config import TrainerModelConfig
    from meshrl.training.parallel.rank_group import RankGroup
    from tiny_families import VOCAB
    from trained import Trained


def train(base: Path, out: Path, parallel: RankGroup) -> dict[str, Any]:
    """What is found of one family; collective."""
    config = TrainerModelConfig(
        name=str(base), device=parallel.device.type, dtype="float32", ac=None, compile=None, attn="sdpa"
    )
    try:
        learner = build_learner(config, parallel=parallel)
    except ValueError as error:
        return {"refused": str(error)}
    trained = Trained.by(learner, Objective(loss=cross_entropy_loss), OptimConfig(lr=1e-3))
    checkpointer = Checkpointer(*trained, out, tokenizer=None, base=config)
    checkpointer.save(weights_only=True)
    published = gather_state(learner.model, torch.bfloat16, keep=parallel.plan.leads)
    if published:
        save_file(published, out / "published.safetensors")
    apart = distance(learner.policy.eval(), base, parallel)
    loss = trained.step(stream_batch(1, dp_size=parallel.plan.dp_size, vocab_size=VOCAB)).loss
    checkpointer.save(weights_only=True)
    return {"apart": apart, "loss": loss}


@torch.no_grad()
def distance(policy: Any, base: Path, parallel: RankGroup) -> float:
    """The largest difference, in nats, from the plain forward pass over each sample alone."""
    source = np.random.default_rng(0)
    samples = [source.integers(2, VOCAB, length) for length in SAMPLE_LENGTHS]
    found, _ = policy(packed_row(samples, policy, parallel.device))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if (attention := attention_implementation(plain.config)) is not None:
        plain.set_attn_implementation(attention)
    plain.to(parallel.device)
    expected = torch.cat([plain_logprobs(plain, sample.tolist()) for sample in samples])
    return float((found - expected).abs().max())


def write(bases: str, results: str, device: str, *families: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    parallel = RankGroup.start(os.environ, device=torch.device(device))
    for family in families:
        out = Path(results) / family
        out.mkdir(parents=True, exist_ok=True)
        try:
            found = train(Path(bases) / family, out, parallel)
        except Exception as error:
            if not parallel.plan.is_alone:  # the other ranks wait in a collective
                raise
            found = {"failed": repr(error)}
        if parallel.plan.leads:
            (out / "result.json").write_text(json.dumps(found))
        gc.collect()


def main() -> None:
    warnings.simplefilter("ignore")
    write(*sys.argv[1:])
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
