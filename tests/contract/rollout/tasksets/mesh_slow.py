"""Single-turn taskset of the tests that never ends one of its stages."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf

__all__ = ["SlowTaskset"]


class SlowData(vf.TaskData):
    stuck_in: str = ""

    async def reach(self, stage: str) -> None:
        if stage == self.stuck_in:
            await asyncio.Event().wait()


class SlowTask(vf.Task[SlowData]):
    async def setup(self, trace, runtime):
        await self.data.reach("setup")

    async def finalize(self, trace, runtime):
        await self.data.reach("finalize")

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        await self.data.reach("reward")
        return 1.0


class SlowConfig(vf.TasksetConfig):
    stuck_in: tuple[str, ...] = ("setup", "finalize", "reward")


class SlowTaskset(vf.Taskset[SlowTask, SlowConfig]):
    def load(self):
        for stage in self.config.stuck_in:
            yield SlowTask(SlowData(prompt="hello", stuck_in=stage), self.config.task)
