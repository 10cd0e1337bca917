"""The phases of a program's start, from the birth of its process, as spans and as one line of its log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loguru import logger
from opentelemetry.trace import Tracer, set_span_in_context

START_SPAN = "rl.start"


@dataclass(frozen=True)
class Phase:
    """Between two times of time.time()."""

    name: str
    began_s: float
    ended_s: float


class Start:
    """The first phase, imports, ends where this is made. Phases may overlap."""

    def __init__(self, began_s: float | None = None) -> None:
        self.began_s = process_began_s() if began_s is None else began_s
        self.phases = [Phase("imports", self.began_s, time.time())]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.time()
        try:
            yield
        finally:
            self.phases.append(Phase(name, began_s, time.time()))

    def end(self, tracer: Tracer) -> None:
        ended_s = time.time()
        span = tracer.start_span(START_SPAN, start_time=_ns(self.began_s))
        for phase in sorted(self.phases, key=lambda phase: phase.began_s):
            inside = tracer.start_span(
                f"{START_SPAN}.{phase.name}", context=set_span_in_context(span), start_time=_ns(phase.began_s)
            )
            inside.end(_ns(phase.ended_s))
        span.end(_ns(ended_s))
        self.log("ready", ended_s)

    def log(self, what: str, ended_s: float) -> None:
        listed = ", ".join(
            f"{phase.name} {phase.began_s - self.began_s:.1f} to {phase.ended_s - self.began_s:.1f}"
            for phase in sorted(self.phases, key=lambda phase: phase.began_s)
        )
        logger.info("{} {:.1f} s after its process began: {}", what, ended_s - self.began_s, listed)


def start_of(tracer: Tracer) -> Start:
    """New for a tracer that is not a program's."""
    found = getattr(tracer, "start", None)
    return found if isinstance(found, Start) else Start()


def process_began_s() -> float:
    """Of time.time(); now, where the system does not show it."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
