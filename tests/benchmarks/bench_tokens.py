"""Holds every token that trains to what the engine generated, over many multi-turn conversations with tools.

    python tests/benchmarks/bench_tokens.py --rollouts 500
    python tests/benchmarks/bench_tokens.py --rollouts 500 --workers 2 --embedded  # the real engine, real swaps
    python tests/benchmarks/bench_tokens.py --rollouts 500 --workers 2 --embedded --tools  # no rollout without a tool

Weights are swapped all the time, also in the middle of a completion, and templates strip or rewrite earlier turns. Each
completion must be in exactly one sample, bit for bit, behind just the tokens which the engine saw before it.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
PATHS = [str(TESTS / "support"), str(TESTS / "contract" / "rollout" / "tasksets")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])  # of the workers


async def main() -> None:
    from loguru import logger

    from recorded_engine import CASES, play

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=500, help="rollouts of each kind of template")
    parser.add_argument("--templates", type=int, nargs="+", choices=range(len(CASES)), default=range(len(CASES)))
    parser.add_argument("--workers", type=int, default=0, help="worker processes that play them; 0 plays them here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--embedded", action="store_true", help="the embedded engine and a model that was taught to talk"
    )
    parser.add_argument("--lessons", type=int, default=250, help="steps in which that model is taught (default: 250)")
    parser.add_argument(
        "--tools", action="store_true", help="only conversations with a tool, until that many called it"
    )
    options = parser.parse_args()
    logger.remove()
    warnings.simplefilter("ignore", DeprecationWarning)
    columns = (
        "rollouts | with a tool called | turns | samples | trained tokens | versions | completions of two versions"
    )
    print(f"| template | {columns} | equal |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            if number not in options.templates:
                continue
            own = Path(folder) / str(number)
            engine = None if not options.embedded else embedded(options.lessons, options.seed + number)
            seen = await play(
                case, options.rollouts, own, seed=options.seed + number, workers=options.workers,
                in_flight=4 if options.embedded else 1, tools=options.tools, serving=engine,
            )  # fmt: skip
            counts = (seen.rollouts, seen.called, seen.turns, seen.samples, seen.tokens, len(seen.versions), seen.split)
            print(f"| {case} | {' | '.join(f'{count:,}' for count in counts)} | all |", flush=True)


def embedded(lessons: int, seed: int) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Serves the embedded engine with a model that knows the tokenizer; the marks have the same numbers in all."""
    import torch

    import tapped_engine

    torch.set_num_threads(1)

    def serving(tokenizer: Any) -> AbstractAsyncContextManager[Any]:
        if lessons not in TAUGHT:
            TAUGHT[lessons] = tapped_engine.taught(tokenizer, steps=lessons)
        return tapped_engine.serving(TAUGHT[lessons], seed)

    return serving


TAUGHT: dict[int, Any] = {}


if __name__ == "__main__":
    asyncio.run(main())
