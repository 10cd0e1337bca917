"""The tool server of all rollouts."""

from __future__ import annotations

import verifiers.v1 as vf


class SharedCounter(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shared"

    def __init__(self, config: vf.SharedToolsetConfig) -> None:
        super().__init__(config)
        self.calls = 0

    @vf.tool
    def count(self) -> str:
        """Counts the calls of all rollouts."""
        self.calls += 1
        return str(self.calls)


if __name__ == "__main__":
    SharedCounter.run()
