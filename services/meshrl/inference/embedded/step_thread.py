"""The thread of the embedded engine: steps the model, and between two steps takes requests and commands.

A step's results go back to the event loop in one call. If a step fails the thread ends, and every request and command,
whenever it comes, is answered with that error.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from loguru import logger

from meshrl.inference.embedded.runner import ModelRunner
from meshrl.inference.embedded.slots import RequestRow, SlotTable
from meshrl.inference.engine import FinishReason
from meshrl.wire.errors import MeshError, Reason

COMMAND_DEADLINE_S = 60.0
UNKNOWN_VERSION = -1

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Command:
    run: Callable[[], None]
    refuse: Callable[[MeshError], None] = lambda error: None


@dataclass
class StepCounts:
    tokens: int = 0
    prefilled: int = 0
    finished: int = 0
    steps: int = 0
    busy_s: float = 0.0


class StepThread:
    """Steps `runner` over the requests in `table` while not `paused`; at most `budget` prompt tokens a step.

    `version` names the live weights; only commands change it and `paused`.
    """

    def __init__(self, runner: ModelRunner, *, budget: int, version: int | None) -> None:
        self.runner = runner
        self.table = SlotTable(
            num_slots=runner.num_slots,
            max_len=runner.max_len,
            stores=runner.stores,
            now=time.monotonic,
            routes_of=None if runner.routes is None else runner.routes.of,
        )
        self.version = version
        self.paused = False
        self.unfit: str | None = None  # why nothing may be served: a step or a swap of weights failed
        self.counts = StepCounts()
        self._budget = budget
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None ends the thread
        self._outbox: list[Callable[[], None]] = []
        self._over: MeshError | None = None  # what is answered once the thread takes nothing any more
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- from the event loop ----------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, row: RequestRow) -> None:
        self._put(_Command(run=lambda: self.table.waiting.append(row), refuse=row.fail))

    def cancel(self, row: RequestRow) -> None:
        self._put(_Command(run=lambda: self._drop(row)))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` between two steps. Raises what it raises, and MeshError ENGINE_FAILED without a thread."""
        if not self.alive:
            raise MeshError(Reason.ENGINE_FAILED, "the engine's thread is not running; start or restart the engine")
        done: Future[Result] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(function())
                except Exception as error:  # noqa: BLE001 - belongs to whoever called, not to this thread
                    done.set_exception(error)

        def refuse(error: MeshError) -> None:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

        self._put(_Command(run=run, refuse=refuse))
        return await asyncio.wait_for(asyncio.wrap_future(done), COMMAND_DEADLINE_S)

    def soon(self, function: Callable[[], None]) -> None:
        """As `call`, without a waiter."""
        self._put(_Command(run=function))

    async def stop(self) -> None:
        """Aborts the requests that are left."""
        self._inbox.put(None)
        await self.join()

    async def join(self) -> None:
        await asyncio.to_thread(self._thread.join, COMMAND_DEADLINE_S)

    def _put(self, command: _Command) -> None:
        self._inbox.put(command)
        if self._over is not None:
            self._refuse_inbox(self._over)
            self._flush()

    # --- on the thread ----------------------------------------------------------------------

    def defer(self, delivery: Callable[[], None]) -> None:
        """Calls `delivery` on the event loop, after this step."""
        self._outbox.append(delivery)

    def fail_all(self, error: MeshError) -> None:
        for row in [*reversed(self.table.rows), *self.table.waiting]:
            row.fail(error)
            self._drop(row)

    def _drop(self, row: RequestRow) -> None:
        held = row.slot >= 0
        self.table.remove(row)
        if held:
            self._clear(1)

    def _clear(self, rows: int) -> None:
        """Zeroes the slots of rows that left before their end: a mask does not stop values that are not finite."""
        if self.runner.cache is not None:
            for slot in range(self.table.occupied, self.table.occupied + rows):
                self.runner.cache.clear_slot(slot, int(self.table.slots["cached"][slot]))

    def _run(self) -> None:
        try:
            while self._take_inbox():
                if not self.paused and self._has_work():
                    self._step()
                self._flush()
        except Exception as error:  # noqa: BLE001 - the thread is the engine: its requests must learn that it is gone
            logger.exception("the engine's thread failed")
            self.unfit = f"{type(error).__name__}: {error}"
            self._over = MeshError(Reason.ENGINE_FAILED, f"the engine failed: {self.unfit}")
            for row in [*self.table.rows, *self.table.waiting]:  # which stay: what failed may have damaged the table
                row.fail(self._over)
        else:
            self._over = MeshError(Reason.DRAINING, "this engine has shut down")
            for row in [*self.table.rows, *self.table.waiting]:
                row.deliver(self.table.chunk(row, FinishReason.ABORT))
        self._refuse_inbox(self._over)
        self._flush()

    def _has_work(self) -> bool:
        return bool(self.table.occupied or self.table.waiting)

    def _take_inbox(self) -> bool:
        idle = self.paused or not self._has_work()
        while True:
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if command is None:
                return False
            command.run()

    def _step(self) -> None:
        started = time.perf_counter()
        pieces = self.table.schedule(self._budget)
        output = self.runner.step(self.table, pieces)
        self.table.prefilled(pieces)
        if output is not None:
            version = UNKNOWN_VERSION if self.version is None else self.version
            self.counts.tokens += len(output.token_ids)
            left = self.table.absorb(output, version)
            self.counts.finished += len(left)
            if broken := [row for row, reason in left if reason is None]:
                message = f"the model (version {self.version}) produced logits that are not finite; apply other weights"
                logger.error("{}: {} requests failed", message, len(broken))
                self._clear(len(left))
                for row in broken:
                    row.fail(MeshError(Reason.ENGINE_FAILED, message))
        self.counts.prefilled += sum(len(piece.tokens) for piece in pieces)
        self.counts.steps += 1
        self.counts.busy_s += time.perf_counter() - started

    def _refuse_inbox(self, error: MeshError) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command.refuse(error)

    def _flush(self) -> None:
        if not self._outbox or self._loop is None:
            return
        deliveries, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(lambda: [deliver() for deliver in deliveries])
        except RuntimeError:  # the loop is closed: nobody is left to read
            logger.debug("dropped {} deliveries after the event loop had closed", len(deliveries))
