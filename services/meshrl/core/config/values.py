"""Reads the text of flags and variables by what keys accept, and layers as one table."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from copy import copy
from typing import Any, get_args

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Given, Layer
from meshrl.core.config.schema import Kind, Path, Table, exists, nearest
from meshrl.core.config.spellings import UnknownKeyError

NONE = "None"
"""None in text and TOML, where a key takes it."""

_ON = {"true", "t", "on", "yes", "y", "1"}
_OFF = {"false", "f", "off", "no", "n", "0"}
_UNKNOWN = Kind(annotation=None)


def decode(kind: Kind, text: str, origin: str) -> Any:
    """Plain values stay text. Raises ConfigError, naming the `origin`, for JSON that does not parse."""
    stripped = text.strip()
    if text == NONE and kind.nullable:
        return None
    if stripped.startswith("[" if kind.item else "{") and (kind.item or kind.section or kind.value):
        try:
            return json.loads(stripped)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{origin}: expected JSON, got {stripped!r}, which does not parse: {error}") from error
    if kind.item is not None:
        return [decode(kind.item, part.strip(), origin) for part in stripped.split(",")] if stripped else []
    if kind.section and stripped.lower() in _ON:
        return {}
    if kind.section and kind.nullable and stripped.lower() in _OFF:
        return None
    if kind.annotation is not Any:
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:  # plain text
        return text


def in_present_words(root: Kind, layer: Layer) -> tuple[Layer, list[ConfigError]]:
    """The layer with every key under its name, None for "None", {} or None for a boolean that switches an optional
    section, and the user's folder for a "~" at the start of a path or name; and problems: spellings of one key that
    disagree, and unknown keys, whose values are left out."""
    present = Layer()
    problems: dict[Path, ConfigError] = {}
    for written, (value, origin) in layer.given.items():
        path, kind, unknown = _named(root, written, layer, origin)
        if unknown is not None:
            problems.setdefault((*unknown.path, unknown.part), unknown)
            value = {}
        elif isinstance(value, bool) and kind.section and kind.nullable:
            value = {} if value else None
        elif value == NONE and kind.nullable:
            value = None
        elif value == "" and pathlib.Path in (kind.annotation, *get_args(kind.annotation)):
            problems[path] = ConfigError(f"{'.'.join(path)}: is empty (from {origin}); name a path, or leave it out")
        elif (kind.item or kind).annotation not in (None, Any):  # a shell leaves --key=~/folder as it is
            value = _from_home(value)
        other = present.given.setdefault(path, Given(value, origin)).value
        if other != value and unknown is None:
            problems[path] = ConfigError(
                f"{'.'.join(path)}: two spellings of this key disagree, {other!r} and {value!r} ({written[-1]});"
                f" keep only {path[-1]}"
            )
    return present, list(problems.values())


def _from_home(value: object) -> object:
    if isinstance(value, list):
        return [_from_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _named(root: Kind, written: Path, layer: Layer, origin: str) -> tuple[Path, Kind, UnknownKeyError | None]:
    path, kind = Path(), root
    for part in written:
        step, own = kind.step(part), layer.given.get(written[: len(path)])
        if step is None and kind.section is not None and (own is None or own.value != []):
            below = written[len(path) + 1 :]  # named only where it is a key without `part`, one line a table else
            if nearest(kind.section, part) or not exists(kind.section, below):
                below = ()
            unknown = UnknownKeyError(kind, path, part, below)
            key, hint = ".".join((*path, part, *below)), unknown.hint(".".join)
            unknown.args = (f"{key}: no such key (from {origin}){hint}",)
            return path, kind, unknown
        name, kind = step or (part, _UNKNOWN)
        path = (*path, name)
    return path, kind, None


def as_table(kind: Kind, given: Mapping[Path, Given], path: Path = ()) -> Any:
    """The value of the key at `path`. Raises ConfigError for a list with gaps."""
    here = given[()].value if () in given else None
    below: dict[str, dict[Path, Given]] = {}
    for place, each in given.items():
        if place:
            below.setdefault(place[0], {})[place[1:]] = each
    if () in given and not below:
        return copy(here)
    inner: Table = {}
    for part, rest in below.items():
        _, accepted = kind.step(part) or (part, _UNKNOWN)
        inner[part] = as_table(accepted, rest, (*path, part))
    is_list = here == [] or (() not in given and kind.item is not None)
    if not is_list or not all(part.isdecimal() for part in inner):
        return inner
    places = sorted(inner, key=int)
    gap = next((str(place) for place in range(len(places)) if str(place) not in inner), None)
    if gap is not None:
        name = ".".join(path)
        raise ConfigError(
            f"{name}.{places[-1]} is set but {name}.{gap} is not; places of a list start at 0 and leave no gap"
        )
    return [inner[place] for place in places]
