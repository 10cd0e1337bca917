"""Taskset of the tests with a tool server that runs already: the model may ask for a word's length."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["ToolsTaskset"]


class LengthTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "text"


class ToolsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "5" and len(trace.tool_messages) == 2)


class ToolsConfig(vf.TasksetConfig):
    tools_url: str = ""


class ToolsTaskset(vf.Taskset[ToolsTask, ToolsConfig]):
    def load(self):
        yield ToolsTask(vf.TaskData(prompt="how long is house?"), self.config.task)

    @classmethod
    def toolsets(cls, config: ToolsConfig) -> list[vf.Toolset]:
        return [LengthTools(vf.SharedToolsetConfig(url=config.tools_url))]
