"""For each group that one worker plays: which of its events have arrived, and which were recorded. No I/O, no clock.

An event is received when it arrives (its number shows whether it is new) and taken once the caller, who asked for the
group, has recorded it; only then is it acknowledged. A stream that breaks changes nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class SkippedEventError(Exception):
    """An event has a number that does not follow the one before it: the worker breaks the contract."""


@dataclass(eq=False)
class OpenCall(Generic[EventT]):
    """One group at a worker. `received` and `taken` are numbers of events."""

    call_id: str
    rollouts: int
    received: int = 0
    taken: int = 0
    waiting: deque[EventT] = field(default_factory=deque)
    """Received, not taken; the first has the number taken + 1."""


class CallBook(Generic[EventT]):
    """The calls of one worker. `window`: events that it may have sent before they are taken."""

    def __init__(self, window: int) -> None:
        self.calls: dict[str, OpenCall[EventT]] = {}
        self._window = window

    @property
    def credit(self) -> int:
        """What a new stream begins with."""
        return max(0, self._window - sum(len(call.waiting) for call in self.calls.values()))

    def begin(self, call_id: str, rollouts: int) -> OpenCall[EventT]:
        call = self.calls[call_id] = OpenCall[EventT](call_id, rollouts)
        return call

    def receive(self, call_id: str, seq: int, event: EventT) -> bool:
        """Whether the event is new; False for one that was received before, and for one of a call that is over. Raises
        SkippedEventError for one that is too early."""
        call = self.calls.get(call_id)
        if call is None or seq <= call.received:
            return False
        if seq != call.received + 1:
            raise SkippedEventError(f"event {seq} of call {call_id} came after event {call.received}")
        call.received = seq
        call.waiting.append(event)
        return True

    def take(self, call: OpenCall[EventT]) -> int:
        """The caller has recorded the first waiting event; returns its number, which is to be acknowledged."""
        call.waiting.popleft()
        call.taken += 1
        return call.taken

    def end(self, call_id: str) -> OpenCall[EventT] | None:
        """Removes a call, of which no more events are wanted; returns it with the events that still wait."""
        return self.calls.pop(call_id, None)

    def cursors(self, held: Iterable[str]) -> Mapping[str, int]:
        """For a worker that comes back with the calls `held`: the next event to send of each that is still wanted."""
        return {call_id: self.calls[call_id].taken + 1 for call_id in held if call_id in self.calls}

    def missing(self, held: Iterable[str]) -> tuple[list[OpenCall[EventT]], list[OpenCall[EventT]]]:
        """The calls that such a worker lacks: those to start again, and those of which it has lost a part."""
        known = set(held)
        gone = [call for call in self.calls.values() if call.call_id not in known]
        return [call for call in gone if not call.received], [call for call in gone if call.received]
