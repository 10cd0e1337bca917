"""The example task: write a short English sentence backwards, letter by letter."""

from meshrl_examples.lazy import exports

__all__ = ["ReverseTextTaskset"]
__getattr__ = exports(__name__, __all__)
