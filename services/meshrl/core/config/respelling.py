"""Gives keys of a layer their present names by the table of older ones, before layers are merged; no I/O.

Whoever reads a layer (a file, the command line, PRIME_ variables) keeps keys as they were written; here they move to
their present place. What was said about them comes back as notes, and keys that are not there as problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.core.config.layers import Layer
from meshrl.core.config.older_keys import OLDER_KEYS, OlderKey
from meshrl.core.config.schema import Kind, Path, Table

_RL = "rl"


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the table as one program reads it: paths from its own root."""

    old: Path
    new: Path
    why: str
    key: OlderKey

    def is_for(self, value: object) -> bool:
        """Whether the row is for this value of the key."""
        words = self.key.only or tuple(self.key.values)
        return not words or str(value).lower() in words


@dataclass(kw_only=True)
class Respelled:
    """What was found in one layer."""

    notes: list[str] = field(default_factory=list)
    """Keys that were taken under another name, or without effect."""

    problems: list[str] = field(default_factory=list)
    """Keys that there are none of, and pairs of spellings that disagree."""


class OlderSpellings:
    """The table of older keys for one program. `sections` are its places in `rl`; empty for `rl` itself."""

    def __init__(self, root: Kind, sections: Sequence[str]) -> None:
        self._root = root
        self._rows = tuple(_rows(root, tuple(sections)))

    def meant(self, path: Path) -> Kind | None:
        """What a key that this program does not have accepts under its present name; any value where it has none.

        None for a key that is in no row.
        """
        for row in self._rows:
            if _fits(row.old, path):
                if not row.new or row.new == row.old:
                    return _known(self._root, path) if row.new else Kind(annotation=Any, nullable=True)
                moved = (*row.new, *path[len(row.old) :])
                return self.meant(moved) or _known(self._root, moved)
        return None

    def is_older(self, path: Path) -> bool:
        """Whether the table has a word to say about a key."""
        return any(_fits(row.old, path) and row.new != row.old for row in self._rows)

    def apply(self, layer: Layer) -> Respelled:
        """Moves what the layer says under older names to the present ones, and takes out what is not used."""
        found = Respelled()
        for row in self._rows:
            for path in list(_matches(layer.values, row.old)):
                value = _at(layer.values, path)
                if row.is_for(value):
                    self._respell(layer, row, path, value, found)
        found.notes = list(dict.fromkeys(found.notes))
        return found

    def _respell(self, layer: Layer, row: _Row, path: Path, value: Any, found: Respelled) -> None:
        named = _normal(path)
        old, origin = ".".join(named), layer.origin_of(path) or layer.origin
        if row.key.values:
            present = row.key.values[str(value).lower()]
            holder = _at(layer.values, path[:-1])
            holder[int(path[-1]) if isinstance(holder, list) else path[-1]] = present
            found.notes.append(f"{old} {value!r} is {present!r} here (from {origin})")
            return
        _remove(layer.values, path, self._root)
        if not row.new:
            text = f"{old} is not {'used' if row.key.unused else 'there'}: {row.why}"
            (found.notes if row.key.unused else found.problems).append(f"{text} (from {origin})")
            return
        new = _filled(row.new, row.old, named)
        found.notes.append(f"{old} is called {'.'.join(new)} now (from {origin})")
        before = dict(layer.exact)
        for place in [place for place in layer.exact if _normal(place)[: len(named)] == named]:
            layer.exact.setdefault((*new, *_normal(place)[len(named) :]), layer.exact.pop(place))
        for place, own, other in _laid(layer.values, new, value):
            below = place[len(new) :]
            theirs = before.get((*named, *below), origin)
            found.problems.append(
                f"{'.'.join(place)} is {own!r} (from {before.get(place, layer.origin)}), but"
                f" {'.'.join((old, *below))}, as it was called, is {other!r} (from {theirs}); keep only"
                f" {'.'.join(place)}"
            )


def _rows(root: Kind, sections: tuple[str, ...]) -> Iterator[_Row]:
    """The rows that one program reads, without those for keys that it has."""
    for key in OLDER_KEYS:
        old, new = _split(key.old), _split(key.new)
        if not sections:
            if key.alone or old[0] == "sft":
                continue
        elif old[0] not in sections:
            continue
        else:
            old = old[1:]
        why = key.why
        if sections and new:
            if new[0] in sections:
                new = new[1:]
            else:
                why, new = _elsewhere(new), ()
        known = _known(root, old) is not None
        if known and not key.values:
            continue
        if new and _known(root, new) is None:
            continue
        unused = key.unused or (bool(key.new) and not new)
        yield _Row(
            old=old,
            new=new,
            why=why,
            key=key if key.unused == unused else OlderKey(old=key.old, why=key.why, unused=unused, only=key.only),
        )


def _elsewhere(new: Path) -> str:
    """Says whose key it is."""
    programs = ("orchestrator", "trainer", "inference", "rollout", "weights")
    if new[0] in programs:
        return f"it belongs to the {new[0]} program; start that with --{'.'.join(new[1:])}".replace("_", "-")
    return f"it belongs to rl, as {'.'.join(new)}"


def _split(dotted: str) -> Path:
    return tuple(dotted.split(".")) if dotted else ()


def _normal(path: Path) -> Path:
    return tuple(part.replace("-", "_") for part in path)


def _known(kind: Kind, path: Path) -> Kind | None:
    """What a key accepts, by its exact name; None for one that there is not."""
    for part in path:
        step = kind.step("0" if part == "*" else part)
        if step is None or (kind.sections and step[0] != part):  # an alias
            return None
        kind = step[1]
    return kind


def _fits(pattern: Path, path: Path) -> bool:
    """Whether a path is that of the pattern, or below it."""
    return len(path) >= len(pattern) and all(one in ("*", two) for one, two in zip(pattern, path, strict=False))


def _filled(new: Path, old: Path, path: Path) -> Path:
    """The present path, with the places that the older one had for its stars."""
    places = iter([part for one, part in zip(old, path, strict=True) if one == "*"])
    return tuple(next(places, "0") if part == "*" else part for part in new)


def _matches(values: object, pattern: Path, above: Path = ()) -> Iterator[Path]:
    """The paths in a layer that fit a pattern, in its own spelling."""
    if not pattern:
        yield above
        return
    items: list[tuple[str, object]] = []
    if isinstance(values, Mapping):
        items = [(key, item) for key, item in values.items() if isinstance(key, str)]
    elif isinstance(values, list):
        items = [(str(place), item) for place, item in enumerate(values)]
    for key, item in items:
        if pattern[0] in ("*", key.replace("-", "_")):
            yield from _matches(item, pattern[1:], (*above, key))


def _below(values: Any, part: str) -> Any:
    return values[int(part)] if isinstance(values, list) else values[part]


def _at(values: Any, path: Path) -> Any:
    for part in path:
        values = _below(values, part)
    return values


def _remove(values: Table, path: Path, root: Kind) -> None:
    """Takes a value out, and the tables above it that are empty then and no sections of the program."""
    holder = _at(values, path[:-1])
    if isinstance(holder, list):
        holder[int(path[-1])] = {}
        return
    del holder[path[-1]]
    if path[:-1] and not holder and _known(root, _normal(path[:-1])) is None:
        _remove(values, path[:-1], root)


def _laid(values: Any, path: Path, value: Any, above: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Puts a value at a path, key by key; yields what disagrees with what is there: its path and both values."""
    if isinstance(values, Mapping):
        key = next((each for each in values if each.replace("-", "_") == path[0]), path[0])
        there = key in values
    else:
        key, there = path[0], isinstance(values, list) and int(path[0]) < len(values)
    here = (*above, path[0])
    if len(path) > 1:
        if not there or not isinstance(_below(values, key), (dict, list)):
            if isinstance(values, list):
                yield here, values, value
                return
            values[key] = {}
        yield from _laid(_below(values, key), path[1:], value, here)
    elif not there:
        values[key] = value
    elif isinstance(own := _below(values, key), dict) and isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _laid(own, (inner.replace("-", "_"),), item, here)
    elif own != value:
        yield here, own, value
