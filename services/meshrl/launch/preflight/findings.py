"""Input and output of a preflight check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the process of `plugins` does without them
    from meshrl.launch.compose import Part
    from meshrl.launch.config import RLConfig

Severity = Literal["error", "warning", "note"]
"""An error stops the run; a warning may cost something; a note does not."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    severity: Severity
    text: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    config: RLConfig
    parts: Sequence[Part]
    """Empty if they could not be composed, which is a finding of its own."""

    gpus: Sequence[str] = ()
    chosen_ports: Collection[int] = field(default_factory=frozenset)
    elsewhere: Collection[str] = ()
    """Addresses of other nodes."""

    folder_in_use: bool = False
    """By another run, so its ports and hub are taken."""


Check = Callable[[Plan], Iterable[Finding]]


def error(text: str) -> Finding:
    return Finding(severity="error", text=text)


def warning(text: str) -> Finding:
    return Finding(severity="warning", text=text)


def note(text: str) -> Finding:
    return Finding(severity="note", text=text)
