"""Reads the text of flags and variables, and lays layers over each other by what the configuration's keys accept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Given, Layer
from meshrl.core.config.schema import Kind, Path, Table

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


def in_present_words(root: Kind, layer: Layer) -> Layer:
    """The layer with every key under its name, None for "None" where a key takes it, and {} or None for a boolean that
    switches an optional section. Raises ConfigError when two spellings of a key disagree."""
    present = Layer()
    for written, (value, origin) in layer.given.items():
        path, kind = _named(root, written, layer)
        if isinstance(value, bool) and kind is not None and kind.sections and kind.nullable:
            value = {} if value else None
        elif value == NONE and kind is not None and kind.nullable:
            value = None
        other = present.given.setdefault(path, Given(value, origin)).value
        if other != value:
            raise ConfigError(
                f"{'.'.join(path)}: two spellings of this key disagree, {other!r} and {value!r} ({written[-1]});"
                f" keep only {path[-1]}"
            )
    return present


def _named(kind: Kind | None, written: Path, layer: Layer) -> tuple[Path, Kind | None]:
    """A path with every key under its name, and what it accepts, as far as the configuration has such keys."""
    path: Path = ()
    for part in written:
        if kind is not None and kind.discriminator is not None:
            chosen = layer.given.get((*written[: len(path)], kind.discriminator))
            kind = kind if chosen is None else kind.narrowed({kind.discriminator: chosen.value})
        step = None if kind is None else kind.step(part)
        path, kind = (*path, part if step is None else step[0]), None if step is None else step[1]
    return path, kind


class _Places(dict[str, Any]):
    """A list by its places."""


def merged(root: Kind, layers: Iterable[Layer]) -> Table:
    """The layers as one table, the last winning, key by key.

    A list replaces a list, but entries that are addressed by place change single ones. A section whose type is chosen
    anew loses the keys of the type before. Unknown keys stay, for validation to name them. Raises ConfigError when a
    list has gaps.
    """
    table: Table = {}
    for layer in layers:
        for path, (value, _) in layer.given.items():
            holder, kind = _holder(table, root, path)
            if kind.discriminator in path[-1:] and holder.get(path[-1], value) != value:
                holder.clear()
        for path, (value, _) in layer.given.items():
            holder, _ = _holder(table, root, path)
            if value != {} or type(holder.get(path[-1])) is not dict:
                holder[path[-1]] = _Places() if isinstance(value, list) else {} if value == {} else value
    plain: Table = _with_lists(table, ())
    return plain


def _holder(table: Table, kind: Kind, path: Path) -> tuple[Table, Kind]:
    """The table that holds the last key of a path, and what it accepts.

    Made where there is none; what stood there in its place is gone.
    """
    for part, following in pairwise(path):
        step = kind.step(part)
        kind = Kind(annotation=Any) if step is None else step[1]
        below = table.get(part)
        if not isinstance(below, dict) or (isinstance(below, _Places) and not following.isdecimal()):
            table[part] = below = _Places() if kind.item is not None and following.isdecimal() else {}
        table = below
    return table, kind


def _with_lists(value: Any, where: Path) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item, (*where, key)) for key, item in value.items()}
    if not isinstance(value, _Places) or not all(key.isdecimal() for key in inner):
        return inner
    places = sorted(inner, key=int)
    gap = next((str(place) for place in range(len(places)) if str(place) not in inner), None)
    if gap is not None:
        name = ".".join(where)
        raise ConfigError(
            f"{name}.{places[-1]} is set but {name}.{gap} is not; places of a list start at 0 and leave no gap"
        )
    return [inner[place] for place in places]
