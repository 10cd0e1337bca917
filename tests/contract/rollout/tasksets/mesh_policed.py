"""Single-turn taskset of the tests whose task looks at each request, so that its turns go over HTTP."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["PolicedTaskset"]


class PolicedTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def look(self, request: vf.Request) -> vf.Request | None:
        return None

    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class PolicedTaskset(vf.Taskset[PolicedTask, vf.TasksetConfig]):
    def load(self):
        yield PolicedTask(vf.TaskData(prompt="cat", system_prompt="Say it back."), self.config.task)
