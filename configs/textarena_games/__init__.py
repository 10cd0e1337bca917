"""textarena's games as tasksets, for one player and as self-play."""

from .taskset import TextArenaGameEnv, TextArenaGameTaskset

__all__ = ["TextArenaGameEnv", "TextArenaGameTaskset"]
