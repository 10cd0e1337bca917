"""Configuration of `rl`: the components' sections, the keys that they share, and what follows from them."""

from meshrl.launch.config.rl import RLConfig

__all__ = ["RLConfig"]
