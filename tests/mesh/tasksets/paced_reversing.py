"""reverse_text at a pace: a run that tests look at for a while leaves the cores to them."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf
from meshrl.environments.reverse_text.taskset import ReverseTextTask, ReverseTextTaskset

__all__ = ["PacedReversingTaskset"]

PAUSE_S = 1.0


class PacedReversingTask(ReverseTextTask):
    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await asyncio.sleep(PAUSE_S)


class PacedReversingTaskset(ReverseTextTaskset):
    def load(self):
        return (PacedReversingTask(task.data, task.config) for task in super().load())
