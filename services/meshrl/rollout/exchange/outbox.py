"""The events that a worker has yet to deliver, in order, until the orchestrator has acknowledged them. No I/O.

An event goes numbered -> stored (in the spool) -> sent -> acknowledged, and back to stored when its stream breaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpooledEvent:
    call_id: str
    seq: int
    message: bytes
    is_end: bool


@dataclass
class HeldCall:
    """A call of this process or an earlier one. `events` are kept by number, and in the spool up to `stored`."""

    call_id: str
    is_ours: bool
    last_seq: int = 0
    ended: bool = False
    events: dict[int, SpooledEvent] = field(default_factory=dict)
    stored: int = 0

    @property
    def playing(self) -> bool:
        return self.is_ours and not self.ended


class Outbox:
    """`left` are the events of an earlier process."""

    def __init__(self, left: Iterable[SpooledEvent] = ()) -> None:
        self.held_bytes = 0
        """Of all events that are kept."""
        self._calls: dict[str, HeldCall] = {}
        self._ready: deque[tuple[str, int]] = deque()
        for event in left:
            call = self._calls.setdefault(event.call_id, HeldCall(event.call_id, is_ours=False))
            call.events[event.seq] = event
            call.last_seq = call.stored = max(call.last_seq, event.seq)
            call.ended = call.ended or event.is_end
            self.held_bytes += len(event.message)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    @property
    def calls(self) -> tuple[HeldCall, ...]:
        return tuple(self._calls.values())

    @property
    def is_empty(self) -> bool:
        return not self._calls

    def begin(self, call_id: str) -> None:
        """Raises ValueError for a known call."""
        if call_id in self._calls:
            raise ValueError(f"call {call_id} is known")
        self._calls[call_id] = HeldCall(call_id, is_ours=True)

    def next_seq(self, call_id: str) -> int:
        return self._calls[call_id].last_seq + 1

    def add(self, event: SpooledEvent) -> None:
        """The event may be sent once it is `stored`. Raises ValueError for a number out of turn."""
        call = self._calls[event.call_id]
        if call.ended or event.seq <= call.last_seq:
            raise ValueError(f"event {event.seq} of call {event.call_id} after {call.last_seq}")
        call.events[event.seq] = event
        call.last_seq, call.ended = event.seq, event.is_end
        self.held_bytes += len(event.message)

    def stored(self, event: SpooledEvent) -> None:
        """A call dropped meanwhile stays dropped."""
        call = self._calls.get(event.call_id)
        if call is not None and event.seq in call.events:
            call.stored = max(call.stored, event.seq)
            self._ready.append((event.call_id, event.seq))

    def next_event(self) -> SpooledEvent | None:
        while self._ready:
            call_id, seq = self._ready.popleft()
            call = self._calls.get(call_id)
            if call is not None and seq in call.events:
                return call.events[seq]
        return None

    def acknowledge(self, call_id: str, seq: int) -> None:
        """A call is forgotten once its end is acknowledged."""
        call = self._calls.get(call_id)
        if call is None:
            return
        for number in [number for number in call.events if number <= seq]:
            self.held_bytes -= len(call.events.pop(number).message)
        if call.ended and not call.events:
            del self._calls[call_id]

    def drop(self, call_id: str) -> None:
        call = self._calls.pop(call_id, None)
        if call is not None:
            self.held_bytes -= sum(len(event.message) for event in call.events.values())

    def resume(self, cursors: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Begins a new stream; `cursors` has for each wanted call the number to send from. Returns the calls that were
        dropped as unneeded, and those of an earlier process, which need an end."""
        unneeded = tuple(call_id for call_id in self._calls if call_id not in cursors)
        for call_id in unneeded:
            self.drop(call_id)
        for call_id, next_seq in cursors.items():
            if call_id in self._calls:
                call = self._calls[call_id]
                call.last_seq = max(call.last_seq, next_seq - 1)
                self.acknowledge(call_id, next_seq - 1)
        self._ready = deque(
            (call.call_id, seq) for call in self.calls for seq in sorted(call.events) if seq <= call.stored
        )
        cut_off = tuple(call.call_id for call in self.calls if not call.is_ours and not call.ended)
        return unneeded, cut_off
