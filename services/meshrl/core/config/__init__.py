"""Configuration: one set of classes, filled from the command line, TOML files and the environment."""

from meshrl.core.config.base import BaseConfig, ConfigError

__all__ = ["BaseConfig", "ConfigError"]
