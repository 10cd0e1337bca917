"""Tool taskset of bench_rollouts: one shared tool server, started by verifiers, whose tool counts letters."""

from __future__ import annotations

import random
import string

import verifiers.v1 as vf

__all__ = ["CountTools", "ToolsTaskset"]


class CountTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "text"

    @vf.tool
    async def length(self, word: str) -> str:
        """Counts the characters of a word."""
        return str(len(word))


class ToolsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float(all(message.content == "5" for message in trace.tool_messages))


class ToolsConfig(vf.TasksetConfig):
    characters: int = 100


class ToolsTaskset(vf.Taskset[ToolsTask, ToolsConfig]):
    INFINITE = True

    def load(self):
        draw = random.Random(0)
        while True:
            text = "".join(draw.choices(string.ascii_letters, k=self.config.characters))
            yield ToolsTask(vf.TaskData(prompt=text), self.config.task)

    @classmethod
    def toolsets(cls, config: ToolsConfig) -> list[vf.Toolset]:
        return [CountTools(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    CountTools.run()
