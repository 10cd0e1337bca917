"""The tool example: follow a trail of words, where only a tool knows which word comes after which."""

__all__ = ["WordTrailTaskset"]


def __getattr__(name: str) -> object:
    """The taskset once verifiers asks for it: its import takes seconds that the demonstrations do not need."""
    if name == "WordTrailTaskset":
        from .taskset import WordTrailTaskset

        return WordTrailTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
