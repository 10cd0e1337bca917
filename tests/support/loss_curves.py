"""Trains one small model on one stream of batches under several settings; a program, alone or as a rank of torchrun.

    python loss_curves.py MODEL RESULT.json STEPS '{"name": {model settings}, ...}'

Rank 0 writes, for each name, the loss and gradient norm of every step and a digest-like sum of the final weights.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.core.heap import loading

with loading():
    import numpy as np
    import torch
    import torch.distributed as dist
    from numpy.typing import NDArray

    from meshrl.algorithms.losses import dppo_kl_loss
    from meshrl.algorithms.objective import Objective
    from meshrl.algorithms.packing import TrainSample, pack_samples
    from meshrl.models.state import gather_state
    from meshrl.training.auto_settings import choose_layout
    from meshrl.training.build import build_learner
    from meshrl.training.config import OptimConfig
    from meshrl.training.model_config import TrainerModelConfig
    from meshrl.training.parallel.rank_group import RankGroup
    from meshrl.wire.types import MicroBatch, RoutedShape
    from meshrl.wire.types.routes import Routes, narrowed
    from trained import Trained


def stream_batch(
    step: int,
    *,
    dp_size: int,
    vocab_size: int,
    prompt: int = 0,
    share: bool = False,
    routed: RoutedShape | None = None,
    unknown: bool = True,
    samples: int = 11,
) -> tuple[MicroBatch, ...]:
    """The batch of a step: the same samples whatever the number of ranks, packed for it.

    With `prompt` they begin with so many tokens of one of two prompts, which rows hold once with `share`. With `routed`
    they come with routes, which a token and its place decide; with `unknown` one token of five has none.
    """
    source = np.random.default_rng(step)
    prompts = source.integers(0, vocab_size, (2, prompt)) if prompt else np.zeros((2, 0), np.int64)
    made = [
        TrainSample(
            token_ids=np.concatenate([prompts[index % 2], source.integers(0, vocab_size, length)]).astype(np.int32),
            loss_mask=np.arange(prompt + length) >= max(2, prompt),
            logprobs=(source.normal(scale=0.3, size=prompt + length) - np.log(vocab_size)).astype(np.float32),
            advantage=float(source.normal()),
            temperature=float(source.uniform(0.7, 1.3)),
            group=str(index % 2),
        )
        for index, length in enumerate(source.integers(4, 40, samples))
    ]
    if routed is not None:
        made = [replace(each, routed_experts=_routes(each.token_ids, routed, unknown=unknown)) for each in made]
    return pack_samples(made, seq_len=96, dp_size=dp_size, min_shared_prefix=0.0 if share else None).micro_batches


def _routes(token_ids: NDArray[np.int32], shape: RoutedShape, *, unknown: bool) -> Routes:
    first_TL = np.arange(len(token_ids))[:, None] + token_ids[:, None] + np.arange(shape.layers)
    chosen_TLK = (first_TL[:, :, None] + np.arange(shape.per_token)) % shape.experts
    return narrowed(np.where(unknown & (token_ids[:, None, None] % 5 == 0), -1, chosen_TLK), shape.experts)


def curve(settings: dict[str, Any], model: str, steps: int) -> dict[str, Any]:
    """One training. `prompt` and `share` among the settings are the stream's, `max_logits_bytes` and `optim` the
    trainer's, the rest the model's. With `evaluate`, each batch is evaluated between its backward pass and its step."""
    evaluate = settings.pop("evaluate", False)
    stream = {name: settings.pop(name) for name in ("prompt", "share") if name in settings}
    logits_bytes = settings.pop("max_logits_bytes", None)
    optim = OptimConfig.model_validate({"lr": 1e-3, **settings.pop("optim", {})})
    config = TrainerModelConfig.model_validate({"name": model, "device": "cpu", **settings})
    parallel = RankGroup.start(os.environ, device=torch.device("cpu"), **choose_layout(config, os.environ, seq_len=96))
    trained = Trained.by(
        build_learner(config, parallel=parallel, max_logits_bytes=logits_bytes),
        Objective(loss=partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)),
        optim,
    )
    vocab_size = int(trained.model.config.vocab_size)
    results = []
    for step in range(steps):
        rows = stream_batch(step, dp_size=parallel.plan.dp_size, vocab_size=vocab_size, **stream)
        trained.pass_rows(rows)
        if evaluate:
            trained.learner.evaluate(trained.run, rows)
        results.append(trained.learner.optim_step(trained.run))
    weights = gather_state(trained.model)
    return {
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "zero_grad_ratio": [result.zero_grad_ratio for result in results],
        "tokens": [len(result.tokens.logprobs) for result in results],
        "weights": {name: float(tensor.double().norm()) for name, tensor in weights.items()},
    }


def main() -> None:
    model, result, steps, wanted = sys.argv[1:]
    torch.set_num_threads(1)
    curves = {name: curve(settings, model, int(steps)) for name, settings in json.loads(wanted).items()}
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps(curves))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
