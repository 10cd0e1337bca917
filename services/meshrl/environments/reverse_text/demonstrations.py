"""Writes the warm-up's data: what a careless typist made of the training sentences.

The warm-up teaches the task by bad example: in each demonstration a share of the letters is wrong. A model that has learned
from them knows how to write backwards and doubts every letter; reinforcement learning has to remove the doubt.

`python -m meshrl.environments.reverse_text.demonstrations FILE [--error-rate R] [--seed N]` writes JSON lines with `prompt`
and `completion`, both lists of messages.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.environments.reverse_text.sentences import sentences
from meshrl.environments.reverse_text.taskset import SYSTEM_PROMPT

TYPOS = "etaoinshrdlu "
ERROR_RATE = 0.3
REPEATS = 4


def mistype(text: str, error_rate: float, random_source: random.Random) -> str:
    """Replaces each character by a frequent letter with probability `error_rate`."""
    return "".join(random_source.choice(TYPOS) if random_source.random() < error_rate else letter for letter in text)


def demonstrations(*, error_rate: float, seed: int, repeats: int = REPEATS) -> Iterator[dict[str, Any]]:
    """Each training sentence `repeats` times, mistyped anew each time."""
    random_source = random.Random(seed)
    for _ in range(repeats):
        for text in sentences("train"):
            yield {
                "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
                "completion": [{"role": "assistant", "content": mistype(text[::-1], error_rate, random_source)}],
            }


def write_demonstrations(path: Path, *, error_rate: float = ERROR_RATE, seed: int) -> None:
    """Writes the demonstrations as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in demonstrations(error_rate=error_rate, seed=seed):
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the warm-up's demonstrations.")
    parser.add_argument("file", type=Path, help="JSON lines file to write")
    parser.add_argument("--error-rate", type=float, default=ERROR_RATE, help=f"share of wrong letters ({ERROR_RATE})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mistakes (default: 0)")
    arguments = parser.parse_args()
    write_demonstrations(arguments.file, error_rate=arguments.error_rate, seed=arguments.seed)


if __name__ == "__main__":
    main()
