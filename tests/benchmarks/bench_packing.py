"""What ranks wait for each other at the micro-steps of a step, by how samples are divided among rows.

    python tests/benchmarks/bench_packing.py [--samples N] [--seq-len N]

Prints for some distributions of sample lengths the cost of a step (see meshrl.algorithms.balance: sum over micro-steps
of the costliest row) over its lower bound, an even share for each rank, so 1.00 is perfect: first-fit decreasing with
rows sorted by tokens, then `divide`, which balances by cost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.balance import SampleCost, divide, waiting_cost

DISTRIBUTIONS: Mapping[str, Callable[[np.random.Generator, int, int], NDArray[np.float64]]] = {
    "log-normal": lambda rng, count, seq_len: rng.lognormal(np.log(seq_len / 8), 0.8, count),
    "uniform": lambda rng, count, seq_len: rng.uniform(16, seq_len, count),
    "few long": lambda rng, count, seq_len: np.where(
        rng.random(count) < 0.2, rng.uniform(0.6 * seq_len, seq_len, count), rng.uniform(16, seq_len / 16, count)
    ),
    "short": lambda rng, count, seq_len: rng.uniform(64, seq_len / 32, count),
}
ROUNDS = 10


def measure(name: str, *, dp_size: int, samples: int, seq_len: int) -> tuple[float, float, float]:
    """Sorted by tokens and by cost, both over the lower bound, and milliseconds a call."""
    rng, cost = np.random.default_rng(0), SampleCost()
    by_tokens = by_cost = bound = seconds = 0.0
    for _ in range(ROUNDS):
        drawn = DISTRIBUTIONS[name](rng, samples, seq_len)
        lengths: list[int] = np.clip(drawn, 2, seq_len).astype(int).tolist()
        costs = [cost(length) for length in lengths]
        # Where attention costs nothing and one rank packs, rows come by first-fit decreasing, sorted by tokens.
        rows = divide(lengths, seq_len=seq_len, dp_size=1, cost=SampleCost(attention=0.0))
        by_tokens += waiting_cost(rows, costs, dp_size)
        started = time.perf_counter()
        rows = divide(lengths, seq_len=seq_len, dp_size=dp_size, cost=cost)
        seconds += time.perf_counter() - started
        by_cost += waiting_cost(rows, costs, dp_size)
        bound += sum(costs) / dp_size
    return by_tokens / bound, by_cost / bound, 1000 * seconds / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description="How long ranks wait for each other, by how samples are packed.")
    parser.add_argument("--samples", type=int, default=256, help="samples of a step (default 256)")
    parser.add_argument("--seq-len", type=int, default=16384, help="tokens of a row (default 16384)")
    read = parser.parse_args()
    print(f"{read.samples} samples, rows of {read.seq_len} tokens; cost of a step over an even share")
    print(f"{'lengths':<12} {'ranks':>5} {'by tokens':>10} {'by cost':>8} {'gain':>6} {'ms':>6}")
    for name in DISTRIBUTIONS:
        for dp_size in (2, 4, 8):
            before, after, milliseconds = measure(name, dp_size=dp_size, samples=read.samples, seq_len=read.seq_len)
            gain = f"{100 * (1 - after / before):.0f}%"
            print(f"{name:<12} {dp_size:>5} {before:>10.3f} {after:>8.3f} {gain:>6} {milliseconds:>6.1f}")


if __name__ == "__main__":
    main()
