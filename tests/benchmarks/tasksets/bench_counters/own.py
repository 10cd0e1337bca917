"""The tool server that each rollout has of its own."""

from __future__ import annotations

import verifiers.v1 as vf


class OwnCounter(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "own"

    def __init__(self, config: vf.ToolsetConfig) -> None:
        super().__init__(config)
        self.calls = 0

    @vf.tool
    def count(self) -> str:
        """Counts the calls of this rollout."""
        self.calls += 1
        return str(self.calls)


if __name__ == "__main__":
    OwnCounter.run()
