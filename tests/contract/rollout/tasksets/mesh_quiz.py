"""Single-turn taskset of the tests with an answer that a judge may compare, for environments of verifiers' own."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["QuizTaskset"]


class QuizData(vf.TaskData):
    answer: str = ""


class QuizTask(vf.Task[QuizData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class QuizTaskset(vf.Taskset[QuizTask, vf.TasksetConfig]):
    def load(self):
        for word in ("cat", "house"):
            yield QuizTask(QuizData(prompt=f"say {word}", answer=word), self.config.task)
