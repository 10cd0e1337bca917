"""The self-play example: two agents take matches from a heap in turns, and both are the policy."""

from meshrl_examples.lazy import exports

__all__ = ["NimEnv", "NimTaskset"]
__getattr__ = exports(__name__, __all__)
