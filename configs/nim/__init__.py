"""The self-play example: two agents take matches from a heap in turns, and both are the policy."""

__all__ = ["NimEnv", "NimTaskset"]


def __getattr__(name: str) -> object:
    """The taskset once verifiers asks for it: its import takes seconds that the demonstrations do not need."""
    if name in __all__:
        from . import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
