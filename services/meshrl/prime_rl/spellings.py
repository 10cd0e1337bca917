"""Gives keys that are spelt as in prime-rl their names here, by the table in `keys`; no I/O.

Readers of a layer (a file, the command line, PRIME_ variables) keep keys as written; here they move to their place.
Notes name moved keys, problems those without a successor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshrl.core.config import BaseConfig
from meshrl.core.config.layers import Given, Layer
from meshrl.core.config.schema import Kind, Path, kind_of
from meshrl.core.config.spellings import Spellings
from meshrl.prime_rl.keys import KEYS, ForeignKey

_PROGRAMS = ("orchestrator", "trainer", "inference", "rollout", "weights")


@dataclass(frozen=True, kw_only=True)
class _Row:
    old: Path
    new: Path
    key: ForeignKey

    @property
    def words(self) -> tuple[str, ...]:
        return self.key.only or tuple(self.key.values)

    def fits(self, path: Path) -> bool:
        """Whether a path is the row's, or below it if the row is for all values."""
        fits = all(one in ("*", two) for one, two in zip(self.old, path, strict=False))
        return fits and (len(path) == len(self.old) or (len(path) > len(self.old) and not self.words))

    def is_for(self, path: Path, value: object) -> bool:
        return self.fits(path) and (not self.words or str(value).lower() in self.words)

    def renamed(self, path: Path) -> Path:
        """The path here, with the other's places for stars."""
        places = iter([part for one, part in zip(self.old, path, strict=False) if one == "*"])
        return (*(next(places, "0") if part == "*" else part for part in self.new), *path[len(self.old) :])


class PrimeRLKeys(Spellings):
    """For one program; `section` is its place in `rl`, "" for one that has none."""

    def __init__(self, cls: type[BaseConfig], section: str = "") -> None:
        super().__init__(kind_of(cls))
        self._rows = tuple(_rows(self.root, section))

    def meant(self, path: Path) -> Kind | None:
        row = next((row for row in self._rows if row.new != row.old and row.fits(path)), None)
        if row is None:
            return None
        if not row.new:
            return Kind(annotation=Any, nullable=True)
        return self.meant(row.renamed(path)) or _known(self.root, row.renamed(path))

    def apply(self, layer: Layer) -> tuple[list[str], list[str]]:
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
                    own.given[path] = Given(row.key.values[str(value).lower()], origin)
                    notes.setdefault(f"{old} {value!r} is {own.given[path].value!r} here", origin)
                    if row.new == row.old:
                        layer.given[path] = own.given[path]
                        continue
                del layer.given[path]
                holders = (path[:end] for end in range(len(path) - 1, 0, -1))
                holder = next((each for each in holders if _known(self.root, _plain(each)) is not None), None)
                if holder is not None:  # the section that the key was in stays, as it is by default
                    layer.given.setdefault(holder, Given({}, origin))
                if row.new:
                    notes.setdefault(f"{old} is called {'.'.join(row.renamed(name[: len(row.old)]))} here", origin)
                    problems += _moved(layer, own, path, row)
                else:
                    if row.key.unused:  # once for all entries of a list
                        notes.setdefault(f"{'.'.join(row.old)} is not used: {row.key.why}", origin)
                    else:
                        gone.setdefault(f"{old} is not there: {row.key.why}", origin)
        said, refused = ([f"{text} (from {origin})" for text, origin in texts.items()] for texts in (notes, gone))
        return said, [*refused, *problems]


def _moved(layer: Layer, own: Layer, path: Path, row: _Row) -> Iterator[str]:
    """Gives a value its place; yields a problem if the layer sets another value there."""
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
        yield f"{key} is set (from {own_origin}), and {old}, as prime-rl calls it, too (from {origin}); keep only {key}"
    elif there != value:
        key = ".".join(new)
        yield (
            f"{key} is {there!r} (from {own_origin}), but {'.'.join(name)}, as prime-rl calls it, is {value!r}"
            f" (from {origin}); keep only {key}"
        )


def _rows(root: Kind, section: str) -> Iterator[_Row]:
    for key in KEYS:
        old, new = (tuple(filter(None, dotted.split("."))) for dotted in (key.old, key.new))
        if (old[0] != section) if section else (key.alone or old[0] == "sft"):
            continue
        if section:
            old = old[1:]
            if new and new[0] != section:
                program, flag = new[0], ".".join(new[1:]).replace("_", "-")
                owner = (
                    f"the {program} program; start that with --{flag}" if program in _PROGRAMS else f"rl, as {key.new}"
                )
                key, new = replace(key, why=f"it belongs to {owner}", unused=True), ()
            new = new[1:]
        known = _known(root, old)
        is_free = known is None or known.annotation is Any or bool(key.values)
        if is_free and (not new or _known(root, new) is not None):
            yield _Row(old=old, new=new, key=key)


@cache
def _plain(path: Path) -> Path:
    return tuple(part.replace("-", "_") for part in path)


def _known(kind: Kind, path: Path) -> Kind | None:
    for part in path:
        step = kind.step("0" if part == "*" else part)
        if step is None or (kind.section and step[0] != part):  # an alias
            return None
        kind = step[1]
    return kind
