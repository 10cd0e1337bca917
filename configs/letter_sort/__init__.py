"""The sorting example: letters come in over three turns, each reply lists all of them in alphabetical order."""

from meshrl_examples.lazy import exports

__all__ = ["LetterSortEnv", "LetterSortTaskset"]
__getattr__ = exports(__name__, __all__)
