"""reasoning-gym's procedural tasks as tasksets, and the example that mixes three of its datasets."""

from .taskset import ReasoningGymTaskset

__all__ = ["ReasoningGymTaskset"]
