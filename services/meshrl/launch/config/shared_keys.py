"""Keys of `rl` that its components share: how one layer of configuration hands them down.

Each is declared once, in RLConfig, with the component keys that take its value:
`max_steps: Annotated[int | None, HandedTo(("trainer.max_steps", "orchestrator.max_steps"))]`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from meshrl.core.config.schema import ReadTable, Table

COMPONENTS = ("rollout", "trainer", "weights", "inference", "orchestrator")

_SWITCHED_ON = "__switched_on__"
_MISSING = object()


@dataclass(frozen=True)
class HandedTo:
    """Marks a key of `rl` whose value components take, by the dotted paths of their keys."""

    targets: tuple[str, ...]
    key: str = ""
    """For a section of which only one key is shared: that key's dotted path below it."""

    even_none: bool = False
    """None is handed down as well, since it switches something off."""


def every_component(key: str) -> tuple[str, ...]:
    """The paths of a key that all components have."""
    return tuple(f"{name}.{key}" for name in COMPONENTS)


def hand_down(section: type[BaseModel], layer: ReadTable) -> Table:
    """Copies the shared keys of one layer to the components; a component's own key in the same layer wins.

    Layers are merged afterwards, so a shared key on the command line beats a component's key in a file, and a
    component's key on the command line beats both. A shared key alone does not switch `inference` on.
    """
    spread = copy.deepcopy(dict(layer))
    is_off = "inference" in spread and spread["inference"] is None
    if isinstance(spread.get("inference"), dict):
        spread["inference"][_SWITCHED_ON] = True
    for shared, value in _shared_values(section, spread):
        for target in shared.targets:
            if not (is_off and target.startswith("inference.")):
                _put_under(spread, target.split("."), value)
    return spread


def _shared_values(section: type[BaseModel], values: ReadTable) -> Iterator[tuple[HandedTo, Any]]:
    """The shared keys that these values set, in the order of their declaration."""
    for name, field in section.model_fields.items():
        for shared in field.metadata:
            if not isinstance(shared, HandedTo):
                continue
            found: Any = values
            for key in filter(None, (name, *shared.key.split("."))):
                found = found.get(key, _MISSING) if isinstance(found, Mapping) else _MISSING
            if found is not _MISSING and (found is not None or shared.even_none):
                yield shared, found


def _put_under(values: Table, path: list[str], shared: Any) -> None:
    """Sets one key of a component, below what the component says itself."""
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            return  # the component is switched off, or wrong, which validation reports
    key = path[-1]
    if key not in values:
        values[key] = copy.deepcopy(shared)
    elif isinstance(shared, Mapping) and isinstance(values[key], dict):
        for inner, value in shared.items():
            _put_under(values[key], [inner], value)


def drop_unused_inference(values: Table) -> bool:
    """Drops an inference section that only shared keys have filled; True when an engine is to be started."""
    inference = values.get("inference")
    if not isinstance(inference, dict):
        return inference is not None
    if inference.pop(_SWITCHED_ON, False):
        return True
    del values["inference"]
    return False
