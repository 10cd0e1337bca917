"""The tool server of the word trail, a program that verifiers starts once for all rollouts, over MCP."""

from __future__ import annotations

import verifiers.v1 as vf

from .trail import word_after


class WordTrailTools(vf.Toolset[vf.SharedToolsetConfig]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Knows the order of the words."""

    TOOL_PREFIX = None

    @vf.tool  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    def after(self, word: str) -> str:
        """The word after it."""
        try:
            return word_after(word)
        except KeyError:
            return "none"


if __name__ == "__main__":
    WordTrailTools.run()
