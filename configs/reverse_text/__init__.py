"""The example task: write a short English sentence backwards, letter by letter."""

__all__ = ["ReverseTextTaskset"]


def __getattr__(name: str) -> object:
    """The taskset once verifiers asks for it: its import takes seconds that the model and the data do not need."""
    if name == "ReverseTextTaskset":
        from .taskset import ReverseTextTaskset

        return ReverseTextTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
