"""Writes a configuration as TOML that loads back as the same configuration."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import tomli_w
from pydantic import SecretStr

from meshrl.core.config.base import BaseConfig
from meshrl.core.config.values import NONE
from meshrl.core.durable import write_file


def dump_toml(config: BaseConfig, path: Path) -> None:
    """Writes every key but secrets, None as "None". Only the file's owner may read it, since free arguments may hold
    secrets. Blocking."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, to_toml(config), mode=0o600)


def to_toml(config: BaseConfig, *, given_only: bool = False) -> str:
    """Without secrets. `given_only` leaves out keys that were not set."""
    return tomli_w.dumps(_plain(config.model_dump(exclude_unset=given_only)))


def _plain(value: object) -> Any:
    match value:
        case None:
            return NONE
        case Enum():
            return _plain(value.value)
        case PurePath():
            return str(value)
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items() if not isinstance(item, SecretStr)}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
    return value
