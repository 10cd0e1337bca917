"""A proposer names letters, solvers sort them: one agent poses what several runs of another solve.

The solvers' reward is how close they come; the proposer's is 0 for anything but so many different letters as it is
asked for, else higher the harder its letters are for the solvers. `python posed_sorting.py FOLDER` writes a warm-up in
which letters are named and sorted (a share of them alphabetically).
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

import verifiers.v1 as vf

from meshrl.environments.letter_sort.demonstrations import OTHER_ORDERS
from meshrl.environments.letter_sort.letters import SYSTEM_PROMPT, right_reply
from meshrl.environments.reverse_text.taskset import similarity
from meshrl.environments.words import Split

__all__ = ["PosedSortingEnv", "PosedSortingTaskset"]

PROPOSER_PROMPT = "Name letters."
COUNTS = (4, 5, 6)
SOLVERS = 4
ROWS = 8000
SHARE = 0.3


class PosedSortingData(vf.TaskData):
    letters: list[str]
    posed: bool


class PosedSortingTask(vf.Task[PosedSortingData]):
    """The environment records the rewards."""


class PosedSortingConfig(vf.TasksetConfig):
    split: Split = "train"
    """held_out: the letters are given, and one solver sorts them."""
    size: int = 1000


def draw(source: random.Random) -> list[str]:
    return source.sample(string.ascii_lowercase, source.choice(COUNTS))


class PosedSortingTaskset(vf.Taskset[PosedSortingTask, PosedSortingConfig]):
    def load(self):
        source = random.Random(f"posed/{self.config.split}")
        for index in range(self.config.size):
            letters, posed = draw(source), self.config.split == "train"
            shown = {"system_prompt": PROPOSER_PROMPT if posed else SYSTEM_PROMPT}
            data = PosedSortingData(idx=index, letters=letters, posed=posed, **shown)
            yield PosedSortingTask(data, self.config.task)


class PosedSortingEnvConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class PosedSortingEnv(vf.Env[PosedSortingEnvConfig]):
    async def run(self, task, agents):
        letters = task.data.letters
        if not task.data.posed:
            await self.solve(task, agents, letters)
            return
        async with agents.proposer.interaction(task) as proposer:
            said = (await proposer.turn(str(len(letters)))).last_reply or ""
            named = said.split(" ")
            valid = len(set(named)) == len(letters) == len(named) and set(named) <= set(string.ascii_lowercase)
            proposer.trace.record_metric("valid", float(valid))
            solvable = task.data.model_copy(update={"system_prompt": SYSTEM_PROMPT})
            solving = type(task)(solvable, task.config)
            scores = [await self.solve(solving, agents, named) for _ in range(SOLVERS)] if valid else []
            proposer.trace.record_reward("posed", 1.0 - sum(scores) / SOLVERS / 2 if valid else 0.0, 1.0)

    async def solve(self, task, agents, letters: list[str]) -> float:
        async with agents.solver.interaction(task) as solver:
            reply = (await solver.turn(" ".join(letters))).last_reply or ""
            score = similarity(reply, right_reply([letters]))
            solver.trace.record_reward("closeness", score, 1.0)
            return score


def rows(count: int, *, share: float, source: random.Random):
    """Every other row names letters, every other sorts them."""
    for number in range(count):
        letters = draw(source)
        if number % 2:
            asked, said, system = str(len(letters)), " ".join(letters), PROPOSER_PROMPT
        else:
            order = right_reply if source.random() < share else source.choice(OTHER_ORDERS)
            asked, said, system = " ".join(letters), order([letters]), SYSTEM_PROMPT
        contents = {"system": system, "user": asked, "assistant": said}
        yield {"messages": [{"role": role, "content": content} for role, content in contents.items()]}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, share in (("train", ROWS, SHARE), ("val", 256, 1.0)):
        made = rows(count, share=share, source=random.Random(name))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


if __name__ == "__main__":
    main()
