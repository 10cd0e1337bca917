"""Writes the golden file of the advantages from plain Python floats; run it only to add a case.

    python tests/golden/advantages/make_golden.py

It shares no code with the package: each formula is a loop over the group, from its paper.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path


def mean_baseline(rewards: list[float], lengths: list[int]) -> list[float]:
    """Dr. GRPO (2503.20783): A_i = R_i - mean."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: list[float], lengths: list[int]) -> list[float]:
    """GRPO (2402.03300): A_i = (R_i - mean) / std, the package's 1e-6 added to std."""
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def rloo(rewards: list[float], lengths: list[int]) -> list[float]:
    """RLOO (2402.14740): A_i = R_i - 1/(k-1) sum_{j != i} R_j."""
    advantages = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i]
        advantages.append(reward - math.fsum(others) / len(others) if others else 0.0)
    return advantages


def opo(rewards: list[float], lengths: list[int]) -> list[float]:
    """OPO (2505.23585): b = sum l_i R_i / sum l_i."""
    products = [length * reward for length, reward in zip(lengths, rewards, strict=True)]
    baseline = math.fsum(products) / sum(lengths)
    return [reward - baseline for reward in rewards]


def soft_overlong(length: int, max_length: int, cache: int) -> float:
    """DAPO (2503.14476), equation 13: the punishment as printed, not positive."""
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return ((max_length - cache) - length) / cache
    return -1.0


ADVANTAGES: dict[str, Callable[[list[float], list[int]], list[float]]] = {
    "default": mean_baseline,
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
}


def main() -> None:
    rng = random.Random(0)
    groups: list[tuple[list[float], list[int]]] = [
        ([1.0, 0.0, 0.0, 1.0], [3, 30, 12, 7]),
        ([1.0, 1.0, 1.0], [5, 6, 7]),
        ([0.3], [4]),
        ([1.0] + [0.0] * 15, [100] + [10] * 15),
    ]
    groups += [
        ([rng.gauss(0.0, 2.0) for _ in range(size)], [rng.randint(1, 200) for _ in range(size)]) for size in (2, 5, 16)
    ]
    cases = []
    for rewards, lengths in groups:
        punishment = [soft_overlong(length, 100, 40) for length in lengths]
        shaped = [reward + punish for reward, punish in zip(rewards, punishment, strict=True)]
        cases.append(
            {
                "rewards": rewards,
                "lengths": lengths,
                "punishment": punishment,
                "advantages": {name: of(rewards, lengths) for name, of in ADVANTAGES.items()},
                "punished": {name: of(shaped, lengths) for name, of in ADVANTAGES.items()},
            }
        )
    record = {"max_length": 100, "buffer_length": 40, "cases": cases}
    (Path(__file__).parent / "groups.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
