"""Exactly once over links that break: what a worker made is booked once, in order, whatever is lost on the way."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshrl.orchestrator.exchange.worker import CallBook, OpenCall
from meshrl.rollout.exchange.outbox import Outbox, SpooledEvent
from meshrl.rollout.exchange.spool import ResultSpool
from meshrl.wire.types import RolloutRequest

WINDOW = 3
REQUEST = RolloutRequest(
    request_id="one", group_id="group", environment="env", task_index=0, group_size=4, deadline_s=60.0
)
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


class Exchange(RuleBasedStateMachine):
    """A worker (outbox and spool) and the orchestrator's book of its calls, with a link that loses what is on it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.spool = ResultSpool(self.folder / "spool.sqlite")
        self.outbox = Outbox()
        self.book: CallBook[SpooledEvent] = CallBook(WINDOW)
        self.up: deque[SpooledEvent] | None = None
        self.down: deque[tuple[str, int, bool]] = deque()
        self.credit = 0
        self.unwritten: list[SpooledEvent] = []
        self.made: dict[str, list[bytes]] = {}  # that reached the spool, by call
        self.booked: dict[str, list[bytes]] = {}
        self.over: set[str] = set()
        self.open: dict[str, OpenCall[SpooledEvent]] = {}
        self.count = 0

    def teardown(self) -> None:
        self.finish()
        self.spool.close()
        shutil.rmtree(self.folder)

    # --- what happens at the worker -------------------------------------------------------------------

    def put(self, call_id: str, *, is_end: bool) -> None:
        self.count += 1
        event = SpooledEvent(call_id, self.outbox.next_seq(call_id), b"%d" % self.count, is_end)
        self.outbox.add(event)
        self.unwritten.append(event)

    def playing(self) -> list[str]:
        return [call.call_id for call in self.outbox.calls if call.playing]

    @precondition(lambda self: self.playing())
    @rule(data=st.data(), is_end=st.booleans())
    def make(self, data: st.DataObject, is_end: bool) -> None:
        self.put(data.draw(st.sampled_from(self.playing())), is_end=is_end)

    @rule()
    def write(self) -> None:
        self.store()

    def store(self, forget: Sequence[tuple[str, int | None]] = ()) -> None:
        """What waits for the spool goes there before anything is forgotten, as in the program."""
        events, self.unwritten = self.unwritten, []
        self.spool.write(events, forget)
        for event in events:
            self.made.setdefault(event.call_id, []).append(event.message)
            self.outbox.stored(event)

    @rule()
    def kill_worker(self) -> None:
        """What was in memory is gone; the next process reads the spool."""
        self.break_link()
        self.spool.close()
        self.spool = ResultSpool(self.folder / "spool.sqlite")
        self.unwritten, self.outbox = [], Outbox(self.spool.read())

    # --- the link ---------------------------------------------------------------------------------------

    @rule()
    def break_link(self) -> None:
        self.up = None
        self.down.clear()

    @precondition(lambda self: self.up is None)
    @rule()
    def attach(self) -> None:
        held = [call.call_id for call in self.outbox.calls]
        again, lost = self.book.missing(held)
        cursors = self.book.cursors(held)
        self.credit, self.up = self.book.credit, deque()
        for call in lost:  # another process, when all that it had made was acknowledged: the group is played elsewhere
            assert call.taken == call.received, f"the worker lost what it made of {call.call_id}"
            self.book.end(call.call_id)
        unneeded, cut_off = self.outbox.resume(cursors)
        self.store([*((one, None) for one in unneeded), *((one, seq - 1) for one, seq in cursors.items())])
        for call in again:
            self.outbox.begin(call.call_id)
        for call_id in cut_off:
            self.put(call_id, is_end=True)

    @precondition(lambda self: self.up is not None and self.credit)
    @rule()
    def send(self) -> None:
        event = self.outbox.next_event()
        if event is not None:
            self.credit -= 1
            assert self.up is not None
            self.up.append(event)

    @precondition(lambda self: self.up)
    @rule()
    def receive(self) -> None:
        assert self.up is not None
        event = self.up.popleft()
        if event.call_id not in self.book.calls:
            self.down.append((event.call_id, 0, True))
            self.credit += 1
        elif not self.book.receive(event.call_id, event.seq, event):
            self.credit += 1
        assert sum(len(call.waiting) for call in self.book.calls.values()) <= WINDOW

    @precondition(lambda self: self.up is not None and self.playing())
    @rule(is_end=st.booleans())
    def make_and_receive(self, is_end: bool) -> None:
        """The usual course of an event, as far as the orchestrator's memory."""
        self.put(self.playing()[0], is_end=is_end)
        self.write()
        for _ in range(self.credit):
            self.send()
        while self.up:
            self.receive()

    @rule()
    def reconnect(self) -> None:
        self.break_link()
        self.attach()

    @precondition(lambda self: self.down)
    @rule()
    def acknowledged(self) -> None:
        call_id, seq, unneeded = self.down.popleft()
        if unneeded:
            self.outbox.drop(call_id)
        else:
            self.outbox.acknowledge(call_id, seq)
        self.store([(call_id, None if unneeded else seq)])

    # --- what happens at the orchestrator ----------------------------------------------------------------

    @rule()
    def start(self) -> None:
        call = self.book.begin(REQUEST)
        call_id = call.call_id
        self.open[call_id] = call
        self.booked[call_id] = []
        if self.up is not None:
            self.outbox.begin(call_id)

    def waiting(self) -> list[str]:
        return [call_id for call_id, call in self.open.items() if call.waiting]

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def book_one(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(self.waiting())))

    def take(self, call_id: str) -> None:
        call = self.open[call_id]
        event = call.waiting[0]
        self.booked[call_id].append(event.message)
        seq, is_known = self.book.take(call), call_id in self.book.calls
        if self.up is not None and is_known:
            self.down.append((call_id, seq, False))
            self.credit += 1
        if event.is_end:
            self.over.add(call_id)
            self.book.end(call_id)

    @precondition(lambda self: self.up is None and self.book.calls)
    @rule()
    def lease_runs_out(self) -> None:
        for call_id in list(self.book.calls):
            self.book.end(call_id)

    # --- what must hold ------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_booked_twice_or_out_of_order(self) -> None:
        for call_id, booked in self.booked.items():
            assert booked == self.made.get(call_id, [])[: len(booked)]

    def finish(self) -> None:
        """The link holds from now on: everything that is still wanted arrives, and the spool is empty."""
        if self.up is None:
            self.attach()
        wanted = set(self.book.calls)
        for _ in range(10_000):
            for call_id in self.playing():
                self.put(call_id, is_end=True)
            self.write()
            if self.credit:
                self.send()
            while self.up:
                self.receive()
            for call_id in self.waiting():
                self.take(call_id)
            while self.down:
                self.acknowledged()
            if self.outbox.is_empty and not self.book.calls:
                break
        assert self.outbox.is_empty
        assert self.outbox.held_bytes == 0
        assert self.spool.read() == []
        for call_id in wanted:
            assert call_id in self.over
            assert self.booked[call_id] == self.made[call_id]


Exchange.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestExchange = Exchange.TestCase
