"""Turns what users write (text of flags and variables, TOML values) into what configuration classes validate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import Kind, Section, field_kind, find_field

NONE = "None"
_ON = {"true", "t", "on", "yes", "y", "1"}
_OFF = {"false", "f", "off", "no", "n", "0"}


def decode(kind: Kind, text: str) -> Any:
    """Reads the text of a flag or an environment variable; plain values stay text, which validation converts.

    Raises ConfigError for JSON that does not parse.
    """
    if text == NONE and kind.nullable:
        return None
    stripped = text.strip()
    if kind.sections and kind.item is None:
        if stripped.startswith("{"):
            return _from_json(stripped)
        if stripped.lower() in _ON:
            return {}
        return None if kind.nullable and stripped.lower() in _OFF else text
    if kind.item is not None:
        if stripped.startswith("["):
            return _from_json(stripped)
        return [decode(kind.item, part.strip()) for part in stripped.split(",")] if stripped else []
    if kind.value is not None:
        return _from_json(stripped) if stripped.startswith("{") else text
    return _guess(text) if kind.is_any else text


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"expected JSON, got {text!r}, which does not parse: {error}") from error


def _guess(text: str) -> Any:
    """Where any value goes: JSON if it parses, else the text itself."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # plain text
        return text


def canonical(sections: Sequence[Section], data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same layer with every key under its present name and "None" as None where a key takes it.

    A boolean for an optional section switches it on, as it is by default or as lower layers have it, or off.
    Unknown keys stay, for validation to name them. Raises ConfigError when two spellings of a key disagree.
    """
    result: dict[str, Any] = {}
    for key, value in data.items():
        found = find_field(sections, key)
        if found is None:
            result[key] = value
            continue
        name, field = found
        cleaned = _canonical_value(field_kind(field), value, f"{where}.{name}" if where else name)
        if name in result and result[name] != cleaned:
            raise ConfigError(
                f"{f'{where}.' if where else ''}{name}: two spellings of this key disagree, {result[name]!r} and "
                f"{cleaned!r} ({key}); keep only {name}"
            )
        result[name] = cleaned
    return result


def _canonical_value(kind: Kind, value: Any, where: str) -> Any:
    if isinstance(value, str):
        return None if value == NONE and kind.nullable else value
    if isinstance(value, bool) and kind.sections and kind.item is None and kind.nullable:
        return {} if value else None
    if kind.item is not None:
        if isinstance(value, list):
            return [_canonical_value(kind.item, item, f"{where}.{place}") for place, item in enumerate(value)]
        if is_indexed(value):
            return {place: _canonical_value(kind.item, item, f"{where}.{place}") for place, item in value.items()}
        return value
    if isinstance(value, Mapping):
        if kind.sections:
            return canonical(kind.section_for(value), value, where)
        inner = kind.value or (kind if kind.is_any else None)
        if inner is not None:
            return {key: _canonical_value(inner, item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list) and kind.is_any:
        return [_canonical_value(kind, item, where) for item in value]
    return value


def is_indexed(value: Any) -> bool:
    """True for entries of a list that are addressed by place: {"0": ..., "1": ...}."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) and key.isdecimal() for key in value)


def by_place(items: Sequence[Any]) -> dict[str, Any]:
    """A list as entries addressed by place."""
    return {str(place): item for place, item in enumerate(items)}


def assign(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets one key of a nested layer, making the sections above it; what stood in the way is replaced."""
    target = data
    for key in path[:-1]:
        below = target.get(key)
        if isinstance(below, list):
            below = by_place(below)
        if not isinstance(below, dict):
            below = {}
        target[key] = below
        target = below
    target[path[-1]] = value


def give_way(kind_sections: Sequence[Section], data: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """What of this layer remains under the layers `above` it, so that a plain deep merge gives the right result.

    A section whose type is chosen anew above loses its keys; a list whose places are set above becomes addressed so.
    """
    remaining: dict[str, Any] = {}
    for key, value in data.items():
        found = find_field(kind_sections, key)
        upper = above.get(key)
        if found is None or not isinstance(upper, Mapping):
            remaining[key] = value
            continue
        kept = _give_way_value(field_kind(found[1]), value, upper)
        if kept is not _GONE:
            remaining[key] = kept
    return remaining


_GONE = object()


def _give_way_value(kind: Kind, value: Any, upper: Mapping[str, Any]) -> Any:
    if kind.item is not None:
        if isinstance(value, list) and is_indexed(upper):
            value = by_place(value)
        if is_indexed(value) and is_indexed(upper):
            kept = {
                place: _give_way_value(kind.item, item, upper[place]) if isinstance(upper.get(place), Mapping) else item
                for place, item in value.items()
            }
            return {place: item for place, item in kept.items() if item is not _GONE}
        return value
    if not kind.sections or not isinstance(value, Mapping):
        return value
    chooser = kind.discriminator
    if chooser is not None and chooser in upper and value.get(chooser, upper[chooser]) != upper[chooser]:
        return _GONE
    return give_way(kind.section_for(upper), value, upper)


def place_lists(sections: Sequence[Section], data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The merged layers with entries addressed by place turned back into lists. Raises ConfigError on a gap."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        found = find_field(sections, key)
        path = f"{where}.{key}" if where else key
        result[key] = value if found is None else _place_value(field_kind(found[1]), value, path)
    return result


def _place_value(kind: Kind, value: Any, where: str) -> Any:
    if kind.item is not None:
        if is_indexed(value):
            value = _to_list(value, where)
        if isinstance(value, list):
            return [_place_value(kind.item, item, f"{where}.{place}") for place, item in enumerate(value)]
        return value
    if kind.sections and isinstance(value, Mapping):
        return place_lists(kind.section_for(value), value, where)
    return value


def _to_list(entries: Mapping[str, Any], where: str) -> list[Any]:
    places = sorted(int(place) for place in entries)
    if places != list(range(len(places))):
        gap = next(place for place in range(len(places)) if place not in places)
        raise ConfigError(
            f"{where}.{places[-1]} is set but {where}.{gap} is not; places of a list start at 0 and leave no gap"
        )
    by_number = {int(place): item for place, item in entries.items()}
    return [by_number[place] for place in places]


def leaves(data: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every path of a nested layer with its value, sections included."""
    for key, value in data.items():
        path = (*prefix, str(key))
        yield path, value
        if isinstance(value, Mapping):
            yield from leaves(value, path)
        elif isinstance(value, list):
            yield from leaves(by_place(value), path)
