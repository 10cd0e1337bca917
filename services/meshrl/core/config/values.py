"""Reads the text of flags and variables, and merges trees of values by what the configuration's keys accept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import Kind, Path, ReadTable, Table

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
    if stripped.startswith("[" if kind.item else "{") and (kind.item or kind.sections or kind.value):
        try:
            return json.loads(stripped)
        except json.JSONDecodeError as error:
            raise ConfigError(f"expected JSON, got {stripped!r}, which does not parse: {error}") from error
    if kind.item is not None:
        return [decode(kind.item, part.strip()) for part in stripped.split(",")] if stripped else []
    if kind.sections and stripped.lower() in _ON:
        return {}
    if kind.sections and kind.nullable and stripped.lower() in _OFF:
        return None
    if not kind.is_any:
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:  # plain text
        return text


def merge(kind: Kind, lower: Any, upper: Any, where: Path = ()) -> Any:
    """`upper` over `lower`, key by key, with every key under its present name and "None" as None where a key takes it.

    A boolean for an optional section switches it on, as it is by default or as `lower` has it, or off. A list replaces
    a list, but entries addressed by place change single ones. A section whose type is chosen anew loses the keys of
    the type before. Unknown keys stay, for validation to name them. Raises ConfigError when two spellings disagree.
    """
    if isinstance(upper, str):
        return None if upper == NONE and kind.nullable else upper
    if isinstance(upper, bool) and kind.sections and kind.nullable:
        upper = {} if upper else None
    if isinstance(upper, list):
        inner = kind if kind.is_any else kind.item
        return upper if inner is None else [merge(inner, None, item, (*where, str(n))) for n, item in enumerate(upper)]
    if not isinstance(upper, Mapping) or (kind.item is not None and not is_indexed(upper)):
        return upper
    if isinstance(lower, list) and kind.item is not None:
        lower = by_place(lower)
    chooser, below = kind.discriminator, dict(lower) if isinstance(lower, Mapping) else {}
    if chooser is not None and chooser in upper and below.get(chooser, upper[chooser]) != upper[chooser]:
        below = {}
    own: Table = {}
    kind = kind.narrowed(upper)
    for key, item in upper.items():
        name, inner = kind.step(key) or (key, None)
        value = item if inner is None else merge(inner, below.get(name), item, (*where, name))
        if name in own and own[name] != value:
            raise ConfigError(
                f"{'.'.join((*where, name))}: two spellings of this key disagree, {own[name]!r} and {value!r}"
                f" ({key}); keep only {name}"
            )
        own[name] = value
    return {**below, **own}


def with_lists(kind: Kind, value: Any, where: Path = ()) -> Any:
    """A merged tree with entries addressed by place turned back into lists. Raises ConfigError on a gap."""
    if kind.item is not None:
        if is_indexed(value):
            places = sorted(int(place) for place in value)
            gap = next((place for place in range(len(places)) if place not in places), None)
            if gap is not None:
                name = ".".join(where)
                raise ConfigError(
                    f"{name}.{places[-1]} is set but {name}.{gap} is not; places of a list start at 0 and leave no gap"
                )
            value = [value[str(place)] for place in places]
        if isinstance(value, list):
            return [with_lists(kind.item, item, (*where, str(place))) for place, item in enumerate(value)]
    if not kind.sections or not isinstance(value, Mapping):
        return value
    kind = kind.narrowed(value)
    steps = ((key, item, kind.step(key)) for key, item in value.items())
    return {key: item if step is None else with_lists(step[1], item, (*where, key)) for key, item, step in steps}


def is_indexed(value: object) -> TypeGuard[ReadTable]:
    """True for entries of a list that are addressed by place: {"0": ..., "1": ...}."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) and key.isdecimal() for key in value)


def by_place(items: Sequence[Any]) -> Table:
    """A list as entries addressed by place."""
    return {str(place): item for place, item in enumerate(items)}


def assign(data: Table, path: Sequence[str], value: object) -> None:
    """Sets one key of a nested tree, making the sections above it; what stood in the way is replaced."""
    for key in path[:-1]:
        below = data.get(key)
        if isinstance(below, list):
            below = by_place(below)
        if not isinstance(below, dict):
            below = {}
        data[key] = below
        data = below
    data[path[-1]] = value
