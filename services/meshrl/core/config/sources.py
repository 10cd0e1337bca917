"""Reads TOML files and PRIME_ variables into layers, and hands all layers to pydantic-settings as its one source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Layer
from meshrl.core.config.respelling import OlderSpellings, UnknownKeyError
from meshrl.core.config.schema import Kind, Path, Table, nearest
from meshrl.core.config.shared import LogConfig, LogLevel
from meshrl.core.config.values import decode, merged

PREFIX = "PRIME_"
LOG_LEVEL = "PRIME_LOG_LEVEL"

OTHER_TOOLS = frozenset({"PRIME_API_KEY", LOG_LEVEL})
"""Variables of other tools whose names are keys here too; PRIME_API_KEY is an account's secret."""


def read_file(section: Path, file: str) -> Layer:
    """The layer that a TOML file makes for a section. Raises ConfigError when it is missing, unreadable or not TOML."""
    name = f"config file {file!r}"
    try:
        values = tomllib.loads(FilePath(file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{name} does not exist (looked in {FilePath.cwd()}); check the path after @") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text ({error.reason}); expected TOML") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; expected a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}; text values need quotes, sections are [name]") from error
    layer = Layer()
    if section or values:
        layer.put(section, values, file)
    return layer


def read_environment(older: OlderSpellings, environ: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """The layer that PRIME_ variables make, and warnings; `__` separates levels, as in PRIME_MODEL__NAME.

    Unknown names are other tools' and are left alone, but one that begins with a known section is a warning.
    """
    layer, warnings = Layer(), []
    level = environ.get(LOG_LEVEL)
    if level and older.root.step("log") is not None:
        try:
            LogConfig.model_validate({"level": level})
        except ValidationError:  # another tool's level: worth a word, not an error
            warnings.append(f"{LOG_LEVEL} is not used: {level!r} is none of {', '.join(get_args(LogLevel))}")
        else:
            layer.put(("log", "level"), level, LOG_LEVEL)
    for variable, text in sorted(environ.items()):
        written = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        others = not variable.startswith(PREFIX) or variable in OTHER_TOOLS
        if others or older.root.step(written[0]) is None:
            continue
        try:
            path, kind = older.find(written)
            layer.put(path, decode(kind, text), variable)
        except UnknownKeyError as unknown:
            close = nearest(unknown.kind.sections, unknown.part, unknown.path) if unknown.kind.sections else None
            nearby = f"; did you mean {PREFIX}{'__'.join(close).upper()}?" if close else ""
            warnings.append(f"{variable} is not used: {unknown}{nearby}")
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from error
    return layer, warnings


class LayersSource(PydanticBaseSettingsSource):
    """The source of settings that holds every layer, the lowest first."""

    def __init__(self, settings: type[BaseSettings], root: Kind, layers: Sequence[Layer]) -> None:
        super().__init__(settings)
        self._root = root
        self._layers = layers

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One top-level value of the layers."""
        return self().get(field_name), field_name, False

    def __call__(self) -> Table:
        """The layers laid over each other. Raises ConfigError when a list has gaps."""
        return merged(self._root, self._layers)


def read_settings(root: Kind, layers: Sequence[Layer]) -> Table:
    """What pydantic-settings makes of the layers, which take the place of its own sources. Raises ConfigError."""

    class Settings(BaseSettings):
        model_config = SettingsConfigDict(extra="allow", protected_namespaces=())

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: object, **__: object
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (LayersSource(settings_cls, root, layers),)

    return Settings().model_extra or {}
