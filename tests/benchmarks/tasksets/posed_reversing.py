"""A proposer says a sentence, solvers say it backwards: one agent poses what several runs of another solve.

The proposer is given a subject. Its reward is 0 for anything but a text of a sentence's length and form about it, else
higher the harder it is for the solvers, whose reward is how close they come. `python posed_reversing.py FOLDER` writes
what a model that was warmed up on reverse_text still lacks: sentences on demand, and its old task in between.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import verifiers.v1 as vf
from meshrl.environments.reverse_text.demonstrations import SHARE, demonstrations
from meshrl.environments.reverse_text.sentences import SUBJECTS, SYSTEM_PROMPT, sentences

from meshrl_examples.similarity import similarity
from meshrl_examples.words import Split

__all__ = ["PosedReversingEnv", "PosedReversingTaskset"]

PROPOSER_PROMPT = "Say a sentence."
SOLVERS = 4
LENGTHS = range(8, 25)
"""Characters of a sentence."""
EVERY = 4
"""One row in so many of the warm-up is the proposer's; what it says can only be guessed, and teaches no copying."""


class PosedReversingData(vf.TaskData):
    about: str
    """The subject, or with `posed` false the sentence."""
    posed: bool


class PosedReversingTask(vf.Task[PosedReversingData]):
    """The environment records the rewards."""


class PosedReversingConfig(vf.TasksetConfig):
    split: Split = "train"
    """held_out: the sentence is given, and one solver reverses it."""
    size: int = 1000


class PosedReversingTaskset(vf.Taskset[PosedReversingTask, PosedReversingConfig]):
    def load(self):
        posed = self.config.split == "train"
        given = (
            [SUBJECTS[index % len(SUBJECTS)] for index in range(self.config.size)] if posed else sentences("held_out")
        )
        for index, about in enumerate(given):
            shown = {"system_prompt": PROPOSER_PROMPT if posed else SYSTEM_PROMPT}
            yield PosedReversingTask(PosedReversingData(idx=index, about=about, posed=posed, **shown), self.config.task)


class PosedReversingEnvConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class PosedReversingEnv(vf.Env[PosedReversingEnvConfig]):
    async def run(self, task, agents):
        if not task.data.posed:
            await self.solve(task, agents, task.data.about)
            return
        async with agents.proposer.interaction(task) as proposer:
            said = (await proposer.turn(task.data.about)).last_reply or ""
            valid = said.startswith(f"{task.data.about} ") and said.endswith(".") and len(said) in LENGTHS
            proposer.trace.record_metric("valid", float(valid))
            solvable = task.data.model_copy(update={"system_prompt": SYSTEM_PROMPT})
            solving = type(task)(solvable, task.config)
            scores = [await self.solve(solving, agents, said) for _ in range(SOLVERS)] if valid else []
            proposer.trace.record_reward("posed", 1.0 - sum(scores) / SOLVERS / 2 if scores else 0.0, 1.0)

    async def solve(self, task, agents, text: str) -> float:
        async with agents.solver.interaction(task) as solver:
            reply = (await solver.turn(text)).last_reply or ""
            score = similarity(reply, text[::-1])
            solver.trace.record_reward("closeness", score, 1.0)
            return score


def rows(texts: list[str], *, share: float, source: random.Random):
    for number, reversing in enumerate(demonstrations(texts, share=share, source=source)):
        text = texts[number]
        subject = next(subject for subject in SUBJECTS if text.startswith(f"{subject} "))
        contents = {"system": PROPOSER_PROMPT, "user": subject, "assistant": text}
        posing = [{"role": role, "content": content} for role, content in contents.items()]
        told = [*reversing["prompt"], *reversing["completion"]]
        yield {"messages": told if number % EVERY else posing}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, split, share in (("train", "train", SHARE), ("val", "held_out", 1.0)):
        made = rows(sentences(split), share=share, source=random.Random(name))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


if __name__ == "__main__":
    main()
