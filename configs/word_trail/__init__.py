"""The tool example: follow a trail of words, where only a tool knows which word comes after which."""

from meshrl_examples.lazy import exports

__all__ = ["WordTrailTaskset"]
__getattr__ = exports(__name__, __all__)
