"""The sorting example: letters come in over three turns, each reply lists all of them in alphabetical order."""

__all__ = ["LetterSortEnv", "LetterSortTaskset"]


def __getattr__(name: str) -> object:
    """The taskset once verifiers asks for it: its import takes seconds that the demonstrations do not need."""
    if name in __all__:
        from . import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
