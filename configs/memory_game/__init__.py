"""The multi-turn example: repeat a list that grows by a word each turn; the environment is the user."""

from meshrl_examples.lazy import exports

__all__ = ["MemoryGameEnv", "MemoryGameTaskset"]
__getattr__ = exports(__name__, __all__)
