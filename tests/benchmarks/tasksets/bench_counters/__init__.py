"""Taskset of the benchmark with two tool servers that verifiers starts: one for all rollouts, one for each."""

from __future__ import annotations

import verifiers.v1 as vf

from bench_counters.own import OwnCounter
from bench_counters.shared import SharedCounter

__all__ = ["CountersTaskset"]


class CountersTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def own(self, trace: vf.Trace) -> float:
        return float(str(trace.tool_messages[0].content) == "1")

    @vf.metric
    async def shared(self, trace: vf.Trace) -> float:
        return float(str(trace.tool_messages[1].content))

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [OwnCounter(vf.ToolsetConfig())]


class CountersTaskset(vf.Taskset[CountersTask, vf.TasksetConfig]):
    def load(self):
        yield CountersTask(vf.TaskData(prompt="count"), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [SharedCounter(vf.SharedToolsetConfig())]
