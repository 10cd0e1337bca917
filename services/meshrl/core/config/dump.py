"""Writes a configuration as TOML that loads back as the same configuration."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from pydantic import SecretStr

from meshrl.core.config.base import BaseConfig
from meshrl.core.config.values import NONE

_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def dump_toml(config: BaseConfig, path: Path) -> None:
    """Writes every key but secrets, None as "None", to `path`, making its folder. An older file is replaced at once.

    Only its owner may read the file: tables of free arguments may hold secrets, too. Blocking.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(to_toml(config))
    unfinished.replace(path)


def to_toml(config: BaseConfig) -> str:
    """The configuration as TOML, plain keys before sections; secrets are left out."""
    return "\n".join(_table(_plain(config.model_dump()), ())) + "\n"


def _plain(value: Any) -> Any:
    """Python values as what TOML can hold."""
    if value is None:
        return NONE
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if not isinstance(item, SecretStr)}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not _is_section(value)]
    for key, value in values.items():
        below = (*path, key)
        name = ".".join(_key(part) for part in below)
        if isinstance(value, Mapping) and value:
            lines += ["", f"[{name}]", *_table(value, below)]
        elif _is_section(value):
            for item in value:
                lines += ["", f"[[{name}]]", *_table(item, below)]
    return lines


def _is_section(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if key and _BARE.issuperset(key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} cannot be written as TOML: {value!r}")
