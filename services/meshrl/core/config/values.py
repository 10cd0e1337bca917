"""Turns what users write (text of flags and variables, TOML values) into what configuration classes validate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import Kind, Path

NONE = "None"
"""How None is written in text and TOML, where a key takes it."""

_ON = {"true", "t", "on", "yes", "y", "1"}
_OFF = {"false", "f", "off", "no", "n", "0"}


def decode(kind: Kind, text: str) -> Any:
    """Reads the text of a flag or an environment variable; plain values stay text, which validation converts.

    Raises ConfigError for JSON that does not parse.
    """
    stripped = text.strip()
    if text == NONE and kind.nullable:
        return None
    if stripped.startswith("{") and (kind.sections or kind.value is not None) and kind.item is None:
        return _from_json(stripped)
    if kind.sections and stripped.lower() in _ON:
        return {}
    if kind.sections:
        return None if kind.nullable and stripped.lower() in _OFF else text
    if kind.item is not None:
        if stripped.startswith("["):
            return _from_json(stripped)
        return [decode(kind.item, part.strip()) for part in stripped.split(",")] if stripped else []
    if not kind.is_any:
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:  # plain text
        return text


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"expected JSON, got {text!r}, which does not parse: {error}") from error


def canonical(kind: Kind, value: Any, where: Path = ()) -> Any:
    """The value with every key under its present name and "None" as None where a key takes it.

    A boolean for an optional section switches it on, as it is by default or as lower layers have it, or off.
    Unknown keys stay, for validation to name them. Raises ConfigError when two spellings of a key disagree.
    """
    if isinstance(value, str):
        return None if value == NONE and kind.nullable else value
    if isinstance(value, bool) and kind.sections and kind.nullable:
        return {} if value else None
    if isinstance(value, list):
        inner = kind if kind.is_any else kind.item
        return value if inner is None else [canonical(inner, item, (*where, str(n))) for n, item in enumerate(value)]
    if not isinstance(value, Mapping) or (kind.item is not None and not is_indexed(value)):
        return value
    kind, result = kind.narrowed(value), {}
    for key, item in value.items():
        found = kind.step(key)
        if found is None:
            result[key] = item
            continue
        name, below = found
        cleaned = canonical(below, item, (*where, name))
        if name in result and result[name] != cleaned:
            raise ConfigError(
                f"{'.'.join((*where, name))}: two spellings of this key disagree, {result[name]!r} and {cleaned!r}"
                f" ({key}); keep only {name}"
            )
        result[name] = cleaned
    return result


def is_indexed(value: object) -> TypeGuard[Mapping[str, Any]]:
    """True for entries of a list that are addressed by place: {"0": ..., "1": ...}."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) and key.isdecimal() for key in value)


def by_place(items: Sequence[Any]) -> dict[str, Any]:
    """A list as entries addressed by place."""
    return {str(place): item for place, item in enumerate(items)}


def assign(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets one key of a nested layer, making the sections above it; what stood in the way is replaced."""
    for key in path[:-1]:
        below = data.get(key)
        if isinstance(below, list):
            below = by_place(below)
        if not isinstance(below, dict):
            below = {}
        data[key] = below
        data = below
    data[path[-1]] = value
