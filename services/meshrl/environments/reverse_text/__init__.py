"""The example task: write a short English sentence backwards, letter by letter."""

from meshrl.environments.reverse_text.taskset import ReverseTextTaskset

__all__ = ["ReverseTextTaskset"]
