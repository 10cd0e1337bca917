"""Trains small models of several families in one process and on every layout of ranks, and compares; a program.

    python layouts.py FOLDER RESULT.json

FOLDER holds a model of each of FAMILIES. The ranks are forked from this process once everything is imported. The result
has for each family, case and layout the loss, gradient norm and further numbers of every step, or the sentence with
which the layout is refused.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshrl.core.heap import loading

with loading():
    import numpy as np
    import torch
    import torch.distributed as dist
    from loguru import logger
    from transformers.utils import logging

    from loss_curves import stream_batch
    from meshrl.algorithms.losses import grpo_loss, gspo_loss
    from meshrl.algorithms.objective import Objective
    from meshrl.training.build import build_learner
    from meshrl.training.config import OptimConfig
    from meshrl.training.model_config import TrainerModelConfig
    from meshrl.training.parallel.rank_group import RankGroup
    from tiny_families import VOCAB, tiny_model
    from trained import Trained

STEPS = 2
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")


class Layout(NamedTuple):
    ranks: int
    sizes: dict[str, int]


LAYOUTS = {
    "cp2": Layout(2, {"cp": 2}),
    "cp4": Layout(4, {"cp": 4}),
    "cp2 x dp2": Layout(4, {"cp": 2}),
    "hsdp2 x cp2": Layout(4, {"dp_replicate": 2, "cp": 2}),
}
CASES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": partial(gspo_loss, clip_low=3e-2, clip_high=4e-2), "model": {}},
    "grpo of adapters": {"loss": partial(grpo_loss, clip_low=0.2, clip_high=0.2), "model": {"lora": {"rank": 4}}},
}


def make_models(folder: Path) -> None:
    """Writes a model of each family into FOLDER/FAMILY; windows, sinks and biases of routers are among them."""
    for family in FAMILIES:
        windows = {"use_sliding_window": False} if family == "qwen3_moe" else {}  # its samples share beginnings
        tiny_model(family, **windows).save_pretrained(folder / family)


def config_of(base: Path, case: str, sizes: dict[str, int]) -> TrainerModelConfig:
    return TrainerModelConfig.model_validate(
        {"name": str(base), "device": "cpu", "dtype": "float32", "ac": None, "compile": None}
        | CASES[case]["model"]
        | sizes
    )


def numbers(base: Path, case: str, layout: Layout, parallel: RankGroup) -> dict[str, Any]:
    """What the steps of a training give; collective."""
    config = config_of(base, case, layout.sizes)
    try:
        learner = build_learner(config, parallel=parallel)
    except ValueError as error:
        return {"refused": str(error)}
    trained = Trained.by(learner, Objective(loss=CASES[case]["loss"]), OptimConfig(lr=1e-3))
    prefixed = {"prompt": 12, "share": True} if learner.policy.prefix_reason is None else {}
    results, logprobs = [], []
    for step in range(STEPS):
        rows = stream_batch(step, dp_size=parallel.plan.dp_size, vocab_size=VOCAB, **prefixed)
        logprobs.append(np.sort(trained.evaluate(rows).logprobs.astype(np.float64)).tolist())
        results.append(trained.step(rows))
    return {
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "zero_grad_ratio": [result.zero_grad_ratio for result in results],
        "shares_prefixes": bool(prefixed),
        "logprobs": logprobs,
        "metrics": [dict(result.metrics) for result in results],
        "routing": [dict(result.routing) for result in results],
    }


def trainings(folder: Path, layouts: dict[str, Layout]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        parallel = RankGroup.start(os.environ, device=torch.device("cpu"), **layout.sizes)
        for family in FAMILIES:
            for case in CASES:
                found[f"{family} / {case} / {name}"] = numbers(folder / family, case, layout, parallel)
    return found


def as_rank(rank: int, ranks: int, store: Path, result: Path, work: Callable[[], dict[str, Any]]) -> None:
    """Forked: becomes a rank, works, and leaves what rank 0 found."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logger.remove()
    torch.set_num_threads(1)
    here = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in here.items()}
    try:
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        found = work()
        if rank == 0:
            result.write_text(json.dumps(found))
        if ranks > 1:
            dist.barrier()
    except BaseException:  # noqa: BLE001  # a forked process must never return into its parent's work
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # torch's threads end with it


def on_ranks(ranks: int, folder: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs `work` on so many forked ranks; raises RuntimeError when one fails."""
    context = multiprocessing.get_context("fork")
    store, result = folder / f"store_{ranks}_{time.monotonic_ns()}", folder / f"result_{ranks}.json"
    members = [context.Process(target=as_rank, args=(rank, ranks, store, result, work)) for rank in range(ranks)]
    for member in members:
        member.start()
    try:
        for member in members:
            member.join(120)
            if member.exitcode:
                raise RuntimeError(f"a rank of {ranks} ended with {member.exitcode}")
    finally:
        for member in members:
            member.kill()
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {}
    for ranks in (1, 2, 4):
        layouts = {name: layout for name, layout in LAYOUTS.items() if layout.ranks == ranks}
        layouts = {"one process": Layout(1, {})} if ranks == 1 else layouts
        started = time.perf_counter()
        found |= on_ranks(ranks, folder, partial(trainings, folder, layouts))
        print(f"{ranks} rank(s): {time.perf_counter() - started:.1f} s", flush=True)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
