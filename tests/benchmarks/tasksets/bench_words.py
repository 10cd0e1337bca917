"""Single-turn taskset of bench_rollouts: endless prompts of random letters, a reward that costs nothing."""

from __future__ import annotations

import random
import string

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class WordsConfig(vf.TasksetConfig):
    characters: int = 100


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    INFINITE = True

    def load(self):
        draw = random.Random(0)
        while True:
            text = "".join(draw.choices(string.ascii_letters, k=self.config.characters))
            yield WordsTask(vf.TaskData(prompt=text), self.config.task)
