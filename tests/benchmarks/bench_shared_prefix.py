"""Seconds of a training step with a group's prompt repeated and shared, by how much of the tokens it is.

    python tests/benchmarks/bench_shared_prefix.py [--model FOLDER] [--groups N] [--group-size N] [--seq-len N]
        [--shape PROMPT,COMPLETION ...] [--rounds N]

Random weights; both packings of the same samples take steps in turns, and the ratio is of medians: seconds on a GPU,
CPU seconds of one thread without one, which a busy machine does not stretch. The default model has about 30 million
parameters, `--width` makes another; on a GPU give one of shapes/. The last column is what the tokens alone promise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from meshrl.algorithms.losses import dppo_kl_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import Packing, TrainSample, pack_samples, shared_prefix_ratio
from meshrl.models.load import resolve_device
from meshrl.training.build import build_learner
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.learner import Learner
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup

SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def samples(shape: tuple[int, int], *, groups: int, size: int, vocab_size: int, seed: int) -> list[TrainSample]:
    """Groups of one prompt and completions of half to one and a half times the shape's length."""
    rng, made = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = rng.integers(0, vocab_size, shape[0])
        for _ in range(size):
            completion = rng.integers(0, vocab_size, int(shape[1] * rng.uniform(0.5, 1.5)))
            tokens = np.concatenate([prompt, completion]).astype(np.int32)
            made.append(
                TrainSample(
                    token_ids=tokens,
                    loss_mask=np.arange(len(tokens)) >= shape[0],
                    logprobs=np.full(len(tokens), -np.log(vocab_size), np.float32),
                    advantage=float(rng.normal()),
                    group=str(group),
                )
            )
    return made


def timed(learner: Learner, packing: Packing) -> float:
    clock = time.perf_counter if learner.device.type == "cuda" else time.process_time
    started = clock()
    learner.step(packing.micro_batches)
    if learner.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--shape", nargs="*", default=["16,256", "32,128", "64,128", "128,128", "256,128"])
    parser.add_argument("--width", type=int, default=512, help="hidden size of the default model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    read = parser.parse_args()
    device = resolve_device("auto")
    if device.type == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if read.model is None:
            shape = SMALL | {"hidden_size": read.width, "intermediate_size": 3 * read.width}
            (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = {"name": str(read.model or folder), "compile": {} if read.compile else None}
        learner = build_learner(
            TrainerModelConfig.model_validate(config),
            objective=Objective(loss=partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)),
            optim=OptimConfig(lr=1e-9),
            scheduler=SchedulerConfig(),
            max_steps=None,
            parallel=RankGroup.start({}, device=device),
            random_weights=True,
        )
    print(f"{read.groups} groups of {read.group_size}, rows of {read.seq_len} tokens, {device}")
    header = f"{'prompt':>7} {'completion':>10} {'shared':>7} {'rows':>9} {'repeated s':>11} {'shared s':>9}"
    print(f"{header} {'gain':>6} {'by tokens':>10}")
    vocab_size = int(learner.model.config.get_text_config().vocab_size)
    for text in read.shape:
        prompt, completion = map(int, text.split(","))
        made = samples((prompt, completion), groups=read.groups, size=read.group_size, vocab_size=vocab_size, seed=0)
        repeated, shared = (pack_samples(made, seq_len=read.seq_len, min_shared_prefix=share) for share in (None, 0.0))
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(read.rounds + 1):
            for kept, packing in zip(times, (repeated, shared), strict=True):
                kept.append(timed(learner, packing))
                if turn == 0:  # warms up
                    kept.clear()
        before, after = map(statistics.median, times)
        ratio = shared_prefix_ratio(shared.micro_batches)
        rows = f"{len(repeated.micro_batches)} -> {len(shared.micro_batches)}"
        line = f"{prompt:>7} {completion:>10} {ratio:>7.1%} {rows:>9} {before:>11.2f} {after:>9.2f}"
        print(f"{line} {before / after:>6.2f} {1 / (1 - ratio):>10.2f}", flush=True)


if __name__ == "__main__":
    main()
