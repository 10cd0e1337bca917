"""Writes the warm-up's data: what a careless typist made of the training sentences.

The warm-up teaches the task by bad example: in each demonstration a share of the letters is wrong. A model that has
learned from them knows how to write backwards and doubts every letter; reinforcement learning removes the doubt.

`python -m meshrl.environments.reverse_text.demonstrations FOLDER [--error-rate R] [--seed N]` writes `train.jsonl`, and
`val.jsonl` with faultless replies to held-out sentences. Rows have `prompt` and `completion`, both lists of messages.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshrl.environments.reverse_text.prompt import SYSTEM_PROMPT
from meshrl.environments.reverse_text.sentences import sentences

TYPOS = "etaoinshrdlu "
ERROR_RATE = 0.3
PASSES = 4


def mistype(text: str, error_rate: float, random_source: random.Random) -> str:
    """Replaces each character by a frequent letter with probability `error_rate`."""
    return "".join(random_source.choice(TYPOS) if random_source.random() < error_rate else letter for letter in text)


def demonstrations(
    texts: Iterable[str], *, error_rate: float, random_source: random.Random
) -> Iterator[dict[str, Any]]:
    """One row a text: the conversation up to the reply, and the mistyped reply."""
    for text in texts:
        yield {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": mistype(text[::-1], error_rate, random_source)}],
        }


def write_demonstrations(folder: Path, *, error_rate: float = ERROR_RATE, seed: int) -> None:
    """Writes the rows as JSON lines; each training sentence comes several times, mistyped anew."""
    random_source = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    train = demonstrations(sentences("train") * PASSES, error_rate=error_rate, random_source=random_source)
    val = demonstrations(sentences("held_out"), error_rate=0.0, random_source=random_source)
    for name, rows in (("train", train), ("val", val)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the warm-up's demonstrations.")
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and val.jsonl")
    parser.add_argument("--error-rate", type=float, default=ERROR_RATE, help=f"share of wrong letters ({ERROR_RATE})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mistakes (default: 0)")
    arguments = parser.parse_args()
    write_demonstrations(arguments.folder, error_rate=arguments.error_rate, seed=arguments.seed)


if __name__ == "__main__":
    main()
