"""The reverse_text taskset for verifiers."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from meshrl_examples.similarity import similarity
from meshrl_examples.words import Split

from .sentences import SYSTEM_PROMPT, sentences


class ReverseTextData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Reply with the user's text written backwards."""

    @vf.reward  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def lcs_ratio(self, trace: vf.Trace) -> float:
        return similarity(trace.last_reply or "", self.data.answer)

    @vf.metric  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ReverseTextConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which sentences to load."""

    split: Split = "train"
    """train, or the held-out sentences that training never sees."""


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Short English sentences to write backwards."""

    def load(self) -> Iterable[ReverseTextTask]:
        for index, text in enumerate(sentences(self.config.split)):
            data = ReverseTextData(idx=index, prompt=text, system_prompt=SYSTEM_PROMPT, answer=text[::-1])
            yield ReverseTextTask(data, self.config.task)
