"""A program's current waits, entered by the code that waits, on any thread; read by the program's `watchdog`, which
logs what lasts unusually long."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from meshrl.wire.program_state import WaitState

OVERDUE_TIMES = 3.0
"""A wait is overdue after so many medians of its name, and LEAST_S."""
LEAST_S = 10.0
REMEMBERED = 64


@dataclass(frozen=True)
class CountedWait:
    """One of many waits of a kind; those of one name and `on` become one line. `began_s` is of time.time."""

    key: object
    name: str
    on: tuple[str, ...]
    began_s: float
    words: str


Named = Collection[str] | Callable[[], Collection[str]]
CountedWaits = Callable[[], Iterable[CountedWait]]


class Waits:
    def __init__(self, now: Callable[[], float] = time.monotonic, *, least_s: float = LEAST_S) -> None:
        self.serves: tuple[str, ...] = ()
        """host:port of the program's server, by which others may name it."""
        self.lags_s: Mapping[str, float] = {}
        """Of the event loops of the run's programs, at the watchdog's last look."""
        self._now = now
        self._least_s = least_s
        self._lock = threading.Lock()
        self._open: dict[object, _OpenWait] = {}
        self._past_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._counted: list[CountedWaits] = []
        self._seen: dict[CountedWait, float] = {}

    @contextmanager
    def waiting(self, name: str, what: str | Callable[[], str], on: Named = ()) -> Iterator[None]:
        """This program waits for `what` of `on` while the block runs. The usual length of the kind `name` is learnt."""
        key = object()
        with self._lock:
            self._open[key] = _OpenWait(name, what, on, self._now())
        try:
            yield
        finally:
            with self._lock:
                self._past_s[name].append(self._now() - self._open.pop(key).since_s)

    def count(self, counted: CountedWaits) -> None:
        """Asks `counted` at each look, on the event loop, for waits that are too many for one each."""
        self._counted.append(counted)

    def look(self, wall_s: float) -> tuple[WaitState, ...]:
        """All waits, the longest first. Called on the event loop; `wall_s` is time.time()."""
        with self._lock:
            opened, now_s = list(self._open.values()), self._now()
        found = [
            self._state(
                wait.name,
                wait.what if isinstance(wait.what, str) else wait.what(),
                wait.on() if callable(wait.on) else wait.on,
                now_s - wait.since_s,
            )
            for wait in opened
        ]
        found += self._look_at_counted(wall_s)
        return tuple(sorted(found, key=lambda wait: wait.seconds, reverse=True))

    def _look_at_counted(self, wall_s: float) -> list[WaitState]:
        seen = {wait: max(0.0, wall_s - wait.began_s) for source in self._counted for wait in source()}
        for wait, lasted_s in self._seen.items():
            if wait not in seen:  # it has ended since the last look
                self._past_s[wait.name].append(lasted_s)
        self._seen = seen
        together: defaultdict[tuple[str, tuple[str, ...]], list[CountedWait]] = defaultdict(list)
        for wait in seen:
            together[wait.name, wait.on].append(wait)
        found = []
        for (name, on), waits in together.items():
            oldest = min(waits, key=lambda wait: wait.began_s)
            found.append(self._state(name, f"{len(waits)} {oldest.words}", on, seen[oldest], reported=True))
        return found

    def _state(self, name: str, what: str, on: Collection[str], seconds: float, *, reported: bool = False) -> WaitState:
        past_s = self._past_s.get(name)
        usual_s = statistics.median(past_s) if past_s else None
        late = seconds >= max(self._least_s, OVERDUE_TIMES * (usual_s or 0.0))
        return WaitState(
            name=name,
            what=what,
            on=tuple(on),
            seconds=round(seconds, 2),
            usual_s=usual_s,
            overdue=late,
            reported=reported,
        )


@dataclass(frozen=True)
class _OpenWait:
    name: str
    what: str | Callable[[], str]
    on: Named
    since_s: float


def waits_of(tracer: Tracer) -> Waits:
    found = getattr(tracer, "waits", None)
    return found if isinstance(found, Waits) else Waits()
