"""Configuration: one set of classes, filled from the command line, TOML files and the environment."""

from meshrl.core.config.base import BaseConfig, ConfigError
from meshrl.core.config.dump import dump_toml, to_toml
from meshrl.core.config.load import load_config

__all__ = ["BaseConfig", "ConfigError", "dump_toml", "load_config", "to_toml"]
