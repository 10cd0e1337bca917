"""Finds the key that a flag or a variable names; subclasses add the spellings of other launchers."""

from __future__ import annotations

from collections.abc import Callable

from meshrl.core.config.base import ConfigError
from meshrl.core.config.layers import Layer
from meshrl.core.config.schema import Kind, Path, describe, nearest, suggestion


class UnknownKeyError(ConfigError):
    """`kind`, at `path`, has no key `part`; `below` are the parts that were written after it."""

    def __init__(self, kind: Kind, path: Path, part: str, below: Path) -> None:
        super().__init__(f"{'.'.join(path)} has no key {part!r}")
        self.kind, self.path, self.part, self.below = kind, path, part, below

    def hint(self, write: Callable[[Path], str]) -> str:
        key = ".".join(self.path)
        if self.kind.item is not None:
            return f": {key} is a list, so a place comes next: {write((*self.path, '0', self.part))}"
        if self.kind.section is None:
            return f": {key} is {describe(self.kind)} and has no keys below it"
        return suggestion(self.kind.section, self.path, self.part, self.below, write)

    @property
    def meant(self) -> Path:
        near = None if self.kind.section is None else nearest(self.kind.section, self.part, self.path)
        return near or (*self.path, self.part)


class Spellings:
    """Of a configuration's own keys; a subclass adds others."""

    def __init__(self, root: Kind) -> None:
        self.root = root

    def find(self, written: Path) -> tuple[Path, Kind]:
        """Another's spelling stays as written. Raises UnknownKeyError."""
        meant = self.meant(written)
        if meant is not None:
            return written, meant
        path, kind = Path(), self.root
        for place, part in enumerate(written):
            step = kind.step(part)
            if step is None:
                raise UnknownKeyError(kind, path, part, written[place + 1 :])
            path, kind = (*path, step[0]), step[1]
        return path, kind

    def meant(self, path: Path) -> Kind | None:
        """What a key in another's spelling accepts, any value where it has no successor. None for other keys."""
        return None

    def apply(self, layer: Layer) -> tuple[list[str], list[str]]:
        """Moves values under others' spellings to present keys, before layers are merged. Returns notes and
        problems."""
        return [], []
