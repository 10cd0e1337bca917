"""Hands down the keys of `rl` that its components share, each declared once in RLConfig:
`max_steps: Annotated[int | None, HandedTo(("trainer.max_steps", "orchestrator.max_steps"))]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from meshrl.core.config.layers import Given, Layer

COMPONENTS = ("rollout", "trainer", "weights", "inference", "orchestrator")
EVERY_RUN = "runs.*."


@dataclass(frozen=True)
class HandedTo:
    """Marks a key of `rl` whose value the keys at these dotted paths take."""

    targets: tuple[str, ...]
    key: str = ""
    """Dotted path of the one key of a section that is shared."""

    even_none: bool = False
    """None, which switches something off, too."""


def every_component(key: str) -> tuple[str, ...]:
    return (*(f"{name}.{key}" for name in COMPONENTS), f"{EVERY_RUN}{key}")


def handed_down(section: type[BaseModel]) -> Iterator[str]:
    for field in section.model_fields.values():
        for shared in field.metadata:
            if isinstance(shared, HandedTo):
                yield from shared.targets


def _runs(layers: Sequence[Layer]) -> tuple[list[str], int]:
    """The places of `runs`, and the number of the last layer that lists them."""
    places: dict[str, None] = {}
    listed = 0
    for number, layer in enumerate(layers):
        part = layer.below(("runs",))
        if () in part:
            places.clear()
            listed = number
        places |= {path[0]: None for path in part if path}
    return list(places), listed


def hand_down(section: type[BaseModel], layers: Sequence[Layer]) -> None:
    """A component's own key in the same layer wins."""
    own = next((part for layer in reversed(layers) if (part := layer.below(("inference",)))), {(): Given(None, "")})
    is_on = () not in own or own[()].value is not None
    runs, listed = _runs(layers)
    for name, field in section.model_fields.items():
        for shared in field.metadata:
            if not isinstance(shared, HandedTo):
                continue
            targets = [
                path.replace("*", place)
                for path in shared.targets
                if is_on or not path.startswith("inference.")
                for place in (runs if path.startswith(EVERY_RUN) else [""])
            ]
            for number, layer in reversed(list(enumerate(layers))):
                part = layer.below((name, *filter(None, shared.key.split("."))))
                if part and (shared.even_none or () not in part or part[()].value is not None):
                    for target in targets:
                        # what lies below the list of runs would be replaced with it
                        place = layers[max(number, listed)] if target.startswith("runs.") else layer
                        place.offer(tuple(target.split(".")), part)
