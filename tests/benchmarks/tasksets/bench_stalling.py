"""The demo's task for the benchmark of stalls: its reward goes wrong once a file says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf

from meshrl.environments.reverse_text.prompt import SYSTEM_PROMPT
from meshrl.environments.reverse_text.sentences import sentences
from meshrl.environments.reverse_text.taskset import similarity

__all__ = ["StallingTaskset"]

LONG_S = 3600.0


class StallingData(vf.TaskData):
    answer: str
    folder: str


class StallingTask(vf.Task[StallingData]):
    @vf.reward
    async def similar(self, trace: vf.Trace) -> float:
        """As in the demo, but for what the files `block` and `hang` make of it."""
        if (Path(self.data.folder) / "block").exists():
            time.sleep(LONG_S)  # noqa: ASYNC251  # that is the fault
        if (Path(self.data.folder) / "hang").exists():
            await asyncio.sleep(LONG_S)
        return similarity(trace.last_reply or "", self.data.answer)


class StallingConfig(vf.TasksetConfig):
    folder: str = ""


class StallingTaskset(vf.Taskset[StallingTask, StallingConfig]):
    def load(self) -> Iterable[StallingTask]:
        for index, text in enumerate(sentences("train")):
            data = StallingData(
                idx=index, prompt=text, system_prompt=SYSTEM_PROMPT, answer=text[::-1], folder=self.config.folder
            )
            yield StallingTask(data, self.config.task)
