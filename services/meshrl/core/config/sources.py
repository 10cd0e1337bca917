"""Reads TOML files and PRIME_ variables into layers, and takes all layers as settings."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import get_args

from pydantic_settings import BaseSettings, SettingsConfigDict

from meshrl.core.config.base import ConfigError, collected
from meshrl.core.config.layers import Given, Layer, leaves
from meshrl.core.config.schema import Path
from meshrl.core.config.shared import LogLevel
from meshrl.core.config.spellings import Spellings, UnknownKeyError
from meshrl.core.config.values import decode

PREFIX = "PRIME_"
LOG_LEVEL = "PRIME_LOG_LEVEL"

OTHER_TOOLS = frozenset({"PRIME_API_KEY", LOG_LEVEL})
"""Variables of other tools whose names are keys here too; PRIME_API_KEY is an account's secret."""

_ENDS = ("]", "}", '"""', "'''")
"""What the last line of a value has that goes over several."""


def read_file(section: Path, file: str) -> Layer:
    """The layer that a TOML file makes for a section, each value with its line.

    Raises ConfigError when the file is missing, unreadable or not TOML.
    """
    name = f"config file {file!r}"
    try:
        text = FilePath(file).read_text(encoding="utf-8-sig")
        values = tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(f"{name} does not exist (looked in {FilePath.cwd()}); check the path after @") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text ({error.reason}); expected TOML") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; expected a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}; text values need quotes, sections are [name]") from error
    lines = key_lines(text)
    return Layer(
        {
            path: Given(value, f"{file}:{line_of(path[len(section) :], lines)}")
            for path, value in leaves(section, values)
            if path
        }
    )


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, on which each key and table of a valid TOML text is set; entries of lists by their places.

    The standard library's parser does not tell it.

    Keys of an inline table and items of a list stand on the line of the key that they are the value of.
    """
    lines: dict[Path, int] = {}
    table = Path()
    entries: Counter[Path] = Counter()
    statement, first = "", 1
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        goes_on = bool(statement) and not any(end in line for end in _ENDS)
        statement += line + "\n"
        if goes_on:  # not read again with every line of a long list
            continue
        try:
            value: object = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:  # a list or a text that goes on
            continue
        is_header = statement.startswith("[", len(statement) - len(statement.lstrip()))
        path = Path() if is_header else table
        while isinstance(value, dict) and len(value) == 1:
            [(key, value)] = value.items()
            path = (*path, key)
            if is_header and entries[path] and value != [{}]:  # a table of the last entry of a list
                path = (*path, str(entries[path] - 1))
        if is_header and value == [{}]:
            lines.setdefault(path, first)
            entries[path] += 1
            path = (*path, str(entries[path] - 1))
        table = path if is_header else table
        lines.setdefault(path, first)
        statement, first = "", number + 1
    return lines


def line_of(path: Path, lines: dict[Path, int]) -> int:
    """The line on which a key is set, or what holds it; 1 where neither is written, as for an empty file."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)


def read_environment(spellings: Spellings, environ: Mapping[str, str], problems: list[str]) -> tuple[Layer, list[str]]:
    """The layer that PRIME_ variables make, and warnings; `__` separates levels, as in PRIME_MODEL__NAME.

    Unknown names are other tools' and are left alone, but one that begins with a known section is a warning. Values
    that cannot be read are added to the `problems`.
    """
    layer, warnings = Layer(), []
    level = environ.get(LOG_LEVEL)
    if level and spellings.root.step("log") is not None:
        if level.lower() in get_args(LogLevel):
            layer.put(("log", "level"), level, LOG_LEVEL)
        else:  # another tool's level: worth a word, not an error
            warnings.append(f"{LOG_LEVEL} is not used: {level!r} is none of {', '.join(get_args(LogLevel))}")
    for variable, text in sorted(environ.items()):
        written = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        others = not variable.startswith(PREFIX) or variable in OTHER_TOOLS
        if others or spellings.root.step(written[0]) is None:
            continue
        try:
            path, kind = spellings.find(written)
        except UnknownKeyError as unknown:
            hint = unknown.hint(lambda path: PREFIX + "__".join(path).upper())
            warnings.append(f"{variable} is not used: {unknown}{hint}")
            continue
        with collected(problems):
            layer.put(path, decode(kind, text, variable), variable)
    return layer, warnings


class Settings(BaseSettings):
    """All layers as pydantic-settings takes them, in place of its own sources."""

    model_config = SettingsConfigDict(extra="allow", protected_namespaces=())
