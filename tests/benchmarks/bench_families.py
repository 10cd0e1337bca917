"""Prints how each family of causal language models runs in trainer and engine, and how far from its plain forward pass.

    OMP_NUM_THREADS=1 PYTHONPATH=tests/support python tests/benchmarks/bench_families.py [FAMILY ...]

The models are tiny and random, in float32 on a CPU; the test of every family, tests/contract/models/test_families.py,
runs the same code. A distance is the largest of any token's logprob, in nats.
"""

from __future__ import annotations

import sys
import warnings

import torch
import transformers
from loguru import logger

from family_checks import Result, check_family
from tiny_families import FAMILIES, NEEDS_MORE


def main(families: list[str]) -> None:
    warnings.simplefilter("ignore")
    logger.remove()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| family | engine | trainer | largest difference (nats) |\n|---|---|---|---|")
    for family in families:
        if family in NEEDS_MORE:
            print(f"| {family} | not tested: {NEEDS_MORE[family]} | | |")
            continue
        result = check_family(family)
        apart = max(part.apart for part in (result.engine, result.trainer))
        largest = "" if result.engine.way == result.trainer.way == "refused" else f"{apart:.1e}"
        print(f"| {family} | {_word(result.engine)} | {_word(result.trainer)} | {largest} |", flush=True)


def _word(result: Result) -> str:
    if result.way == "refused":
        return f"refused: {result.reason}"
    return f"right, {result.way}" if result.way in ("slots", "recomputed") else result.way


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
