"""Single-turn taskset of the benchmark: say a word back."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["QuizTaskset"]


class QuizData(vf.TaskData):
    answer: str = ""


class QuizTask(vf.Task[QuizData]):
    @vf.reward
    async def similar(self, trace: vf.Trace) -> float:
        """Share of the word's letters that the reply has."""
        return sum(letter in trace.last_reply for letter in self.data.answer) / len(self.data.answer)


class QuizTaskset(vf.Taskset[QuizTask, vf.TasksetConfig]):
    def load(self):
        for word in ("cat", "house", "tree", "river"):
            yield QuizTask(QuizData(prompt=f"say {word}", answer=word), self.config.task)
