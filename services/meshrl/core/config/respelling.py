"""Gives keys of a layer their present names by the table of older ones, before layers are merged; no I/O.

Whoever reads a layer (a file, the command line, PRIME_ variables) keeps keys as they were written; here they move to
their present place. What was said about them comes back as notes, and keys that are not there as problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Given, Layer
from meshrl.core.config.older_keys import OLDER_KEYS, OlderKey
from meshrl.core.config.schema import Kind, Path, describe, suggestion

_PROGRAMS = ("orchestrator", "trainer", "inference", "rollout", "weights")


class UnknownKeyError(ConfigError):
    """There is no key `part` at `path`, which accepts `kind`."""

    def __init__(self, kind: Kind, path: Path, part: str) -> None:
        super().__init__(f"{'.'.join(path)} has no key {part!r}")
        self.kind, self.path, self.part = kind, path, part

    def hint(self, write: Callable[[Path], str]) -> str:
        """How to go on there; `write` spells a key as it was written."""
        key = ".".join(self.path)
        if self.kind.item is not None:
            return f": {key} is a list, so a place comes next: {write((*self.path, '0', self.part))}"
        if self.kind.section is None:
            return f": {key} is {describe(self.kind)} and has no keys below it"
        return suggestion(self.kind.section, self.path, self.part, write)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the table as one program reads it: paths from its own root."""

    old: Path
    new: Path
    key: OlderKey

    def fits(self, path: Path) -> bool:
        """Whether a path is that of the row, or below it."""
        return len(path) >= len(self.old) and all(one in ("*", two) for one, two in zip(self.old, path, strict=False))

    def is_for(self, path: Path, value: object) -> bool:
        """Whether the row is for this key with this value."""
        words = self.key.only or tuple(self.key.values)
        return self.fits(path) and (not words or (len(path) == len(self.old) and str(value).lower() in words))

    def renamed(self, path: Path) -> Path:
        """The present path, with the places that the older one had for its stars."""
        places = iter([part for one, part in zip(self.old, path, strict=False) if one == "*"])
        return (*(next(places, "0") if part == "*" else part for part in self.new), *path[len(self.old) :])


class OlderSpellings:
    """The table of older keys for one program. `sections` are its places in `rl`; empty for `rl` itself."""

    def __init__(self, root: Kind, sections: Sequence[str]) -> None:
        self.root = root
        self._rows = tuple(_rows(root, tuple(sections)))

    def find(self, written: Path) -> tuple[Path, Kind]:
        """The path that a flag or variable names and what it accepts; an older spelling is left as it is written.

        Raises UnknownKeyError.
        """
        meant = self.meant(written)
        if meant is not None:
            return written, meant
        path, kind = Path(), self.root
        for part in written:
            step = kind.step(part)
            if step is None:
                raise UnknownKeyError(kind, path, part)
            path, kind = (*path, step[0]), step[1]
        return path, kind

    def meant(self, path: Path) -> Kind | None:
        """What a key in an older spelling accepts under its present name; any value where it has none.

        None for a key of which the table says nothing.
        """
        row = next((row for row in self._rows if row.new != row.old and row.fits(path)), None)
        if row is None:
            return None
        if not row.new:
            return Kind(annotation=Any, nullable=True)
        return self.meant(row.renamed(path)) or _known(self.root, row.renamed(path))

    def apply(self, layer: Layer) -> tuple[list[str], list[str]]:
        """Moves what the layer says under older names to the present ones, and takes out what is not used.

        Returns notes on keys that were taken under another name, or without effect; and problems: keys that there are
        none of, and pairs of spellings that disagree. A section is named once, with its first line.
        """
        notes: dict[str, str] = {}
        gone: dict[str, str] = {}
        problems: list[str] = []
        for row in self._rows:
            found = [path for path, given in layer.given.items() if row.is_for(_plain(path), given.value)]
            own = Layer(layer.given.copy() if found else {})
            for path in found:
                (value, origin), name = own.given[path], _plain(path)
                old = ".".join(name[: len(row.old)])
                if row.key.values:
                    present = row.key.values[str(value).lower()]
                    layer.put(path, present, origin)
                    notes.setdefault(f"{old} {value!r} is {present!r} here", origin)
                    continue
                del layer.given[path]
                holders = (path[:end] for end in range(len(path) - 1, 0, -1))
                holder = next((each for each in holders if _known(self.root, _plain(each)) is not None), None)
                if holder is not None:  # the section that the key was in stays, as it is by default
                    layer.given.setdefault(holder, Given({}, origin))
                if row.new:
                    notes.setdefault(f"{old} is called {'.'.join(row.renamed(name[: len(row.old)]))} now", origin)
                    problems += _moved(layer, own, path, row)
                else:
                    text = f"{old} is not {'used' if row.key.unused else 'there'}: {row.key.why}"
                    (notes if row.key.unused else gone).setdefault(text, origin)
        said, refused = ([f"{text} (from {origin})" for text, origin in texts.items()] for texts in (notes, gone))
        return said, [*refused, *problems]


def _moved(layer: Layer, own: Layer, path: Path, row: _Row) -> Iterator[str]:
    """Gives a value its present name, unless the layer has another there by itself: says so then."""
    value, origin = own.given[path]
    name = _plain(path)
    new = row.renamed(name)
    place = own.taken(next((each for each in own.given if _plain(each) == new), new), value)
    if place is None or place == path[: len(place)]:  # what holds both holds the new one too
        layer.given[(*new[: len(row.new)], *path[len(row.old) :])] = Given(value, origin)
        return
    there, own_origin = own.given[place]
    if _plain(place) != new or (there != value and [] in (there, value)):
        old, key = ".".join(name[: len(row.old)]), ".".join(new[: len(row.new)])
        yield f"{key} is set (from {own_origin}), and {old}, as it was called, too (from {origin}); keep only {key}"
    elif there != value:
        key = ".".join(new)
        yield (
            f"{key} is {there!r} (from {own_origin}), but {'.'.join(name)}, as it was called, is {value!r}"
            f" (from {origin}); keep only {key}"
        )


def _rows(root: Kind, sections: tuple[str, ...]) -> Iterator[_Row]:
    """The rows that one program reads, without those for keys that it has."""
    for key in OLDER_KEYS:
        old, new = (tuple(filter(None, dotted.split("."))) for dotted in (key.old, key.new))
        if (old[0] not in sections) if sections else (key.alone or old[0] == "sft"):
            continue
        if sections:
            old = old[1:]
            if new and new[0] not in sections:
                program, flag = new[0], ".".join(new[1:]).replace("_", "-")
                owner = (
                    f"the {program} program; start that with --{flag}" if program in _PROGRAMS else f"rl, as {key.new}"
                )
                key, new = replace(key, why=f"it belongs to {owner}", unused=True), ()
            new = new[1:]
        if (_known(root, old) is None or key.values) and (not new or _known(root, new) is not None):
            yield _Row(old=old, new=new, key=key)


@cache
def _plain(path: Path) -> Path:
    return tuple(part.replace("-", "_") for part in path)


def _known(kind: Kind, path: Path) -> Kind | None:
    """What a key accepts, by its exact name; None for one that there is not."""
    for part in path:
        step = kind.step("0" if part == "*" else part)
        if step is None or (kind.section and step[0] != part):  # an alias
            return None
        kind = step[1]
    return kind
