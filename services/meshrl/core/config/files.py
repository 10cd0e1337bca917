"""Reads TOML files and PRIME_ variables into layers of values."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from meshrl.core.config.base import ConfigError
from meshrl.core.config.command_line import FileRef
from meshrl.core.config.schema import Kind, Section, field_kind, find_field, nearest
from meshrl.core.config.shared import LogConfig, LogLevel
from meshrl.core.config.values import assign, decode

PREFIX = "PRIME_"
LOG_LEVEL = "PRIME_LOG_LEVEL"

OTHER_TOOLS = frozenset({"API_KEY", "LOG_LEVEL"})
"""PRIME_ variables of other tools whose names are keys here too; PRIME_API_KEY is an account's secret."""


@dataclass(kw_only=True)
class Environment:
    """The layer that PRIME_ variables make, where each value came from, and variables that look like mistakes."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_file(ref: FileRef) -> dict[str, Any]:
    """The layer that a TOML file makes. Raises ConfigError when it is missing, unreadable or not TOML."""
    path = Path(ref.name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"config file {ref.name!r} does not exist (looked in {Path.cwd()}); check the path after @"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {ref.name!r} is not UTF-8 text ({error.reason}); expected TOML") from error
    except OSError as error:
        raise ConfigError(f"config file {ref.name!r} cannot be read: {error.strerror}; expected a TOML file") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"config file {ref.name!r} is not valid TOML: {error}; text values need quotes, sections are [name]"
        ) from error
    if not ref.section:
        return values
    layer: dict[str, Any] = {}
    assign(layer, ref.section, values)
    return layer


def read_environment(section: Section, environ: Mapping[str, str]) -> Environment:
    """The layer that PRIME_ variables make; `__` separates levels. Unknown names are other tools' and are left alone.

    A name that begins with a known section and then goes wrong is reported in `warnings`, never as an error.
    """
    found = Environment()
    if "log" in section.model_fields and environ.get(LOG_LEVEL):
        _take_log_level(environ[LOG_LEVEL], found)
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable.removeprefix(PREFIX) not in OTHER_TOOLS:
            _take_variable(section, variable, text, found)
    return found


def _take_log_level(text: str, found: Environment) -> None:
    try:
        LogConfig.model_validate({"level": text})
    except ValidationError:  # another tool's level: worth a word, not an error
        levels = ", ".join(get_args(LogLevel))
        found.warnings.append(f"{LOG_LEVEL} is not used: {text!r} is none of {levels}")
    else:
        assign(found.values, ("log", "level"), text)
        found.origins[("log", "level")] = LOG_LEVEL


def _take_variable(section: Section, variable: str, text: str, found: Environment) -> None:
    kind = Kind(annotation=section, sections=(section,))
    path: tuple[str, ...] = ()
    for part in variable.removeprefix(PREFIX).lower().split("__"):
        step = _step(kind, part)
        if step is None:
            if path:
                close = nearest(kind.sections, part, path) if kind.sections else None
                meant = f"; did you mean {PREFIX}{close.upper().replace('.', '__')}?" if close else ""
                found.warnings.append(f"{variable} is not used: {'.'.join(path)} has no key {part!r}{meant}")
            return
        name, kind = step
        path = (*path, name)
    try:
        assign(found.values, path, decode(kind, text))
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from error
    found.origins[path] = variable


def _step(kind: Kind, part: str) -> tuple[str, Kind] | None:
    if kind.item is not None:
        return (str(int(part)), kind.item) if part.isdecimal() else None
    if kind.sections:
        field_found = find_field(kind.sections, part)
        return None if field_found is None else (field_found[0], field_kind(field_found[1]))
    if kind.value is not None:
        return part, kind.value
    return (part, kind) if kind.is_any else None
