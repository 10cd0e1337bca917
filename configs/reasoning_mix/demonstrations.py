"""Writes warm-up data for `sft` on reasoning-gym tasks: replies in the requested form, of which a share is right.

The others give the answer to another task of the same dataset. `python -m meshrl.environments.reasoning_demonstrations
FILE FOLDER` takes the training environments of a file for `rl`, with tasks of another seed.
"""

from __future__ import annotations

import argparse
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

from meshrl_examples.demonstrations import read_arguments, write_rows

from .taskset import ReasoningGymConfig, ReasoningGymTask, ReasoningGymTaskset

SHARE = 0.5
ROWS = {"train": 3000, "val": 64}


def tasks(file: Path, *, size: int, seed: int) -> list[list[ReasoningGymTask]]:
    """For each training environment of a file for `rl`, tasks that the run does not draw. Raises ValueError for a file
    without tasks of reasoning-gym."""
    named = tomllib.loads(file.read_text(encoding="utf-8")).get("orchestrator", {}).get("train", {}).get("env", [])
    found = []
    for env in named:
        family, _, dataset = env["id"].partition(":")
        if family.replace("-", "_") == "reasoning_gym":
            args = {"dataset": dataset, **env.get("args", {}), "size": size, "seed": seed}
            found.append(list(ReasoningGymTaskset(ReasoningGymConfig(id=family, **args)).load()))
    if not found:
        raise ValueError(f"{file} has no [[orchestrator.train.env]] whose id begins with reasoning_gym:")
    return found


def demonstrations(
    drawn: list[ReasoningGymTask], *, share: float, source: random.Random
) -> Iterator[dict[str, object]]:
    """With probability `share` a task's answer is the right one, else that of any task."""
    answers = [task.data.answer or "" for task in drawn]
    for task, right in zip(drawn, answers, strict=True):
        answer = right if source.random() < share else source.choice(answers)
        data = task.data
        yield {
            "prompt": [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}],
            "completion": [{"role": "assistant", "content": f"<answer>{answer}</answer>"}],
        }


def write_demonstrations(file: Path, folder: Path, *, share: float = SHARE, seed: int = 0) -> None:
    parts = {}
    for number, (name, size) in enumerate(ROWS.items()):
        source = random.Random(f"{seed}/{name}")
        drawn = tasks(file, size=size, seed=1_000_000 + 2 * seed + number)
        rows = [
            row
            for part in drawn
            for row in demonstrations(part, share=share if name == "train" else 1.0, source=source)
        ]
        source.shuffle(rows)
        parts[name] = rows
    write_rows(folder, train=parts["train"], val=parts["val"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="file for rl, whose training environments are of reasoning-gym")
    given = read_arguments(parser, share=SHARE, share_of="right replies")
    try:
        write_demonstrations(given.file, given.folder, share=given.share, seed=given.seed)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
