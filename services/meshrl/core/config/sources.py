"""Reads TOML files and PRIME_ variables into layers, through the sources of pydantic-settings."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, get_args

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from meshrl.core.config.base import ConfigError, collected
from meshrl.core.config.layers import Given, Layer, leaves
from meshrl.core.config.schema import Path
from meshrl.core.config.shared import LogLevel
from meshrl.core.config.spellings import Spellings, UnknownKeyError
from meshrl.core.config.values import decode

LOG_LEVEL = "PRIME_LOG_LEVEL"

OTHER_TOOLS = frozenset({"PRIME_API_KEY", LOG_LEVEL})
"""Their names are keys here too."""

_ENDS = ("]", "}", '"""', "'''")
"""Of a value over several lines."""


class Settings(BaseSettings):
    """`PRIME_MODEL__NAME` is `model.name`. The keys are those of each program."""

    model_config = SettingsConfigDict(env_prefix="PRIME_", env_nested_delimiter="__", case_sensitive=True)


class TomlFile(TomlConfigSettingsSource):
    """A TOML file for a section, with each value's line. Raises ConfigError for one that cannot be read."""

    def __init__(self, section: Path, file: str) -> None:
        self._section = section
        self._lines: dict[Path, int] = {}
        super().__init__(Settings, file)

    def _read_files(self, files: Any, deep_merge: bool = False) -> dict[str, Any]:
        name = f"config file {files!r}"
        try:
            text = FilePath(files).read_text(encoding="utf-8-sig")
            values = tomllib.loads(text)
        except FileNotFoundError as error:
            raise ConfigError(f"{name} does not exist (looked in {FilePath.cwd()}); check the path after @") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name} is not UTF-8 text ({error.reason}); expected TOML") from error
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}; expected a TOML file") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{name} is not valid TOML: {error}; text values need quotes, sections are [name]"
            ) from error
        self._lines = key_lines(text)
        return values

    def layer(self) -> Layer:
        start = len(self._section)
        return Layer(
            {
                path: Given(value, f"{self.toml_file_path}:{line_of(path[start:], self._lines)}")
                for path, value in leaves(self._section, self())
                if path
            }
        )


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of each key and table of a valid TOML text. Keys of an inline table and items of a list have
    the line of their holder."""
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
    """The line of a key, or of its holder; 1 where neither is written."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)


class Variables(EnvSettingsSource):
    """The PRIME_ variables of an environment, also with places of lists, lists with commas and older spellings."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str]:
        return self._environ

    def layer(self, spellings: Spellings, problems: list[str]) -> tuple[Layer, list[str]]:
        """The layer and warnings, of unknown names that begin with a known section. Unreadable values are added to the
        `problems`."""
        layer, warnings = Layer(), []
        level = self._environ.get(LOG_LEVEL)
        if level and spellings.root.step("log") is not None:
            if level.lower() in get_args(LogLevel):
                layer.put(("log", "level"), level, LOG_LEVEL)
            else:  # another tool's level: worth a word, not an error
                warnings.append(f"{LOG_LEVEL} is not used: {level!r} is none of {', '.join(get_args(LogLevel))}")
        for variable, text in sorted(self._environ.items()):
            written = tuple(variable.removeprefix(self.env_prefix).lower().split(self.env_nested_delimiter))
            others = not variable.startswith(self.env_prefix) or variable in OTHER_TOOLS
            if others or spellings.root.step(written[0]) is None:
                continue
            try:
                path, kind = spellings.find(written)
            except UnknownKeyError as unknown:
                hint = unknown.hint(lambda path: self.env_prefix + "__".join(path).upper())
                warnings.append(f"{variable} is not used: {unknown}{hint}")
                continue
            with collected(problems):
                layer.put(path, decode(kind, text, variable), variable)
        return layer, warnings
