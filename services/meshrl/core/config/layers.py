"""The keys set by a file, the environment or the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from meshrl.core.config.schema import Path


class Given(NamedTuple):
    value: Any
    """A plain value, {} or []; {} is a section or table that is there, [] a list in place of those of lower layers."""

    origin: str


@dataclass
class Layer:
    """Paths from the root and what was given there. Places of a list are parts of a path: ("env", "0", "id")."""

    given: dict[Path, Given] = field(default_factory=dict)

    def put(self, path: Path, value: object, origin: str) -> None:
        if value != {}:  # which switches a section on
            self.given = {place: given for place, given in self.given.items() if not _starts(place, path)}
        self.lay({place: Given(plain, origin) for place, plain in leaves(path, value)})

    def lay(self, upper: Mapping[Path, Given]) -> None:
        """Lays another layer over this one, key by key; a list replaces a list, a place of one changes one entry."""
        for path, given in upper.items():
            gone = next((path[:end] for end in range(len(path)) if not self._may_hold(path[:end], path[end])), path)
            if gone != path or given.value != {} or self.given.get(path, given).value != {}:
                self.given = {place: own for place, own in self.given.items() if not _starts(place, gone)}
            self.given[path] = given

    def _may_hold(self, place: Path, part: str) -> bool:
        value = self.given[place].value if place in self.given else {}
        return value == {} or (value == [] and part.isdecimal())

    def taken(self, path: Path, value: object) -> Path | None:
        """The place at which the layer sets the key, a section above or a key below it."""
        if path in self.given:
            return path
        return next(
            (
                place
                for place in self.given
                if (_starts(path, place) and not self._may_hold(place, path[len(place)]))
                or (_starts(place, path) and value != {})
            ),
            None,
        )

    def offer(self, path: Path, part: Mapping[Path, Given]) -> None:
        """Sets keys below `path` that the layer does not set itself."""
        free = {
            (*path, *rest): given for rest, given in part.items() if self.taken((*path, *rest), given.value) is None
        }
        self.given |= free

    def below(self, path: Path) -> dict[Path, Given]:
        return {place[len(path) :]: given for place, given in self.given.items() if _starts(place, path)}

    def origin_of(self, path: Path) -> str | None:
        """Of what is given at a key, below it or else above it."""
        below = (origin for place, (_, origin) in self.given.items() if _starts(place, path))
        above = (origin for place, (value, origin) in self.given.items() if _starts(path, place) and value != {})
        return next(chain(below, above), None)


def _starts(path: Path, start: Path) -> bool:
    return path[: len(start)] == start


def leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """The plain values at and below `path`, each with its place."""
    if isinstance(value, list):
        yield path, []
        value = {str(place): item for place, item in enumerate(value)}
    elif not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from leaves((*path, key), item)
