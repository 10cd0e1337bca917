"""The multi-turn example: repeat a list that grows by a word each turn; the environment is the user."""

__all__ = ["MemoryGameEnv", "MemoryGameTaskset"]


def __getattr__(name: str) -> object:
    """The taskset once verifiers asks for it: its import takes seconds that the demonstrations do not need."""
    if name in __all__:
        from . import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
