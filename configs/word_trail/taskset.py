"""The word_trail taskset and its tool."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from meshrl_examples.words import Split

from .tools import WordTrailTools
from .trail import SYSTEM_PROMPT, trails


class WordTrailData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    answer: str


class WordTrailTask(vf.Task[WordTrailData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Reply with the word some steps after the user's, asking the tool for each step."""

    @vf.reward  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class WordTrailConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which trails to load, and where the tool is."""

    split: Split = "train"
    """train, or trails from words that training never starts from."""

    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    """The tool server: started beside the rollouts unless `url` names one that runs."""


class WordTrailTaskset(vf.Taskset[WordTrailTask, WordTrailConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Words to start from, each with a number of steps."""

    def load(self) -> Iterable[WordTrailTask]:
        for index, trail in enumerate(trails(self.config.split)):
            data = WordTrailData(idx=index, prompt=trail.prompt, system_prompt=SYSTEM_PROMPT, answer=trail.words[-1])
            yield WordTrailTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: WordTrailConfig) -> list[vf.Toolset]:
        return [WordTrailTools(config.tools)]
