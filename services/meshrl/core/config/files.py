"""Reads a TOML file into a layer of values."""

from __future__ import annotations

import tomllib
from pathlib import Path

from meshrl.core.config.base import ConfigError
from meshrl.core.config.command_line import FileRef
from meshrl.core.config.layers import Layer
from meshrl.core.config.values import assign


def read_file(ref: FileRef) -> Layer:
    """The layer that a TOML file makes. Raises ConfigError when it is missing, unreadable or not TOML."""
    name = f"config file {ref.name!r}"
    try:
        values = tomllib.loads(Path(ref.name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{name} does not exist (looked in {Path.cwd()}); check the path after @") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text ({error.reason}); expected TOML") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; expected a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}; text values need quotes, sections are [name]") from error
    layer = Layer(origin=ref.name, values=values)
    if ref.section:
        layer.values = {}
        assign(layer.values, ref.section, values)
    return layer
