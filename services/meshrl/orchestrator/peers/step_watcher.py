"""Follows the steps of one run at the trainer, over every restart of the trainer.

Each process of a trainer is an epoch: its events are numbered from 1 (revisions), its steps go on from its checkpoint.
Later steps of the old process are repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

from loguru import logger

from meshrl.client import TrainerClient
from meshrl.core.clock import Clock
from meshrl.core.waiting import Pulse, first_of
from meshrl.orchestrator.peers.connect import find_run
from meshrl.sampling.retry import AWAY, RunError, failed
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import RunInfo, StepEvent, StepState

POLL_S = 1.0
"""For the trainer's epoch and durable step, which have no events."""

AGAIN_S = 0.2
"""Between two attempts to reach a trainer that is away."""

CRASH_S = 1.0
"""A trainer that fails a step because it crashes ends its stream within this time."""


class StepWatcher:
    """`follow` runs beside the loop; `changed` beats at each event and each epoch."""

    def __init__(
        self,
        client: TrainerClient,
        *,
        run: RunInfo,
        unreachable_s: float,
        history: bool,
        on_restart: Callable[[RunInfo], None],
        on_durable: Callable[[int], None],
        on_suspended: Callable[[str], None],
        changed: Pulse,
        clock: Clock,
    ) -> None:
        """`history` asks for the events of earlier steps, which otherwise have no metrics. `on_suspended` gets the
        reason at each poll, an empty one while the run is active."""
        self._client = client
        self._unreachable_s = unreachable_s
        self._on_restart = on_restart
        self._on_durable = on_durable
        self._on_suspended = on_suspended
        self._clock = clock
        self._changed = changed
        self._run = run
        self._heard_s = clock.now()
        self._seen = 0 if history else run.revision
        self._failed: dict[int, StepEvent] = {}
        self._done: dict[int, StepEvent] = {}  # not taken yet

    @property
    def epoch(self) -> int:
        return self._run.epoch

    @property
    def step(self) -> int:
        """The trainer's step when its process was first seen: no earlier version comes any more."""
        return self._run.step

    async def follow(self) -> None:
        """Until cancelled. Raises RunError when a step fails, or the trainer does not come back."""
        while True:
            streaming, polling = await first_of(self._stream(), self._poll())
            run = polling.result() if not polling.cancelled() else await self._next_epoch(streaming.result())
            if not streaming.cancelled():
                streaming.exception()  # of an epoch that is over: nobody needs to know
            self._begin_epoch(run)

    def take(self, step: int) -> StepEvent | None:
        """The event that ended `step` in this epoch, once; without metrics if the step was done before it was followed.
        None while it is not done."""
        if step <= self._run.step and self._caught_up:
            return self._done.pop(step, StepEvent(revision=0, step=step, state=StepState.DONE, version=step))
        return self._done.pop(step, None)

    async def restarts(self, epoch: int) -> bool:
        """Waits for the epoch after `epoch`; False when it does not come in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._unreachable_s + POLL_S):
                while self.epoch == epoch:
                    await self._changed.next()
        return self.epoch != epoch

    # --- events -----------------------------------------------------------------------------------

    async def _stream(self) -> str:
        away: MeshError | None = None
        while True:
            left_s = self._heard_s + self._unreachable_s - self._clock.now()
            try:
                async with asyncio.timeout(None if away is None else left_s):
                    await self._read_stream()
                return self._failure() if self._failed else "ended its stream of steps: it is draining"
            except MeshError as error:
                if error.reason is Reason.REVISION_EXPIRED:
                    return ""
                if error.reason not in AWAY:
                    raise failed("trainer", self._client.address, "reporting its steps", error) from error
                away = error
            except TimeoutError:  # away for as long as it may be
                assert away is not None
                doing = f"reporting its steps, and stayed away for {self._unreachable_s:g} s (deadlines.unreachable_s)"
                raise failed("trainer", self._client.address, doing, away) from away
            await self._clock.sleep(min(AGAIN_S, self._unreachable_s))

    async def _read_stream(self) -> None:
        async with aclosing(self._client.watch_steps(self._run.run_id, self._seen)) as events:
            while True:
                failed_for_good = bool(self._failed) and self._caught_up
                try:
                    async with asyncio.timeout(CRASH_S if failed_for_good else None):
                        event = await anext(events, None)
                except TimeoutError:
                    raise RunError(f"trainer at {self._client.address} {self._failure()}") from None
                if event is None:
                    return
                logger.debug(f"trainer: step {event.step} {event.state.value}")
                self._heard_s = self._clock.now()
                self._seen = event.revision
                self._on_durable(event.durable_step)
                match event.state:
                    case StepState.QUEUED:
                        self._failed.pop(event.step, None)
                    case StepState.FAILED:
                        self._failed[event.step] = event
                    case StepState.DONE:
                        self._done[event.step] = event
                self._changed.beat()

    def _failure(self) -> str:
        event = self._failed[min(self._failed)]
        return (
            f"failed step {event.step}: {event.reason}: {event.message}; the weights are those of step {event.step - 1}"
        )

    @property
    def _caught_up(self) -> bool:
        return self._seen >= self._run.revision

    # --- epochs -----------------------------------------------------------------------------------

    async def _poll(self) -> RunInfo:
        while True:
            await self._clock.sleep(POLL_S)
            run = await self._ask()
            if run is None:
                continue
            if run.epoch != self.epoch:
                return run
            self._on_durable(run.durable_step)

    async def _next_epoch(self, why: str) -> RunInfo:
        give_up_at_s = self._clock.now() + self._unreachable_s
        while True:
            run = await self._ask()
            if run is not None and (run.epoch != self.epoch or not why):
                return run
            if self._clock.now() >= give_up_at_s:
                raise RunError(f"trainer at {self._client.address} {why}")
            await self._clock.sleep(min(AGAIN_S, self._unreachable_s))

    async def _ask(self) -> RunInfo | None:
        try:
            run = find_run(self._run.run_id, await self._client.get_trainer())
            self._heard_s = self._clock.now()
            self._on_suspended(str(run.suspension or ""))
            return run
        except (MeshError, RunError) as error:
            logger.debug(f"trainer: {error}")
            return None

    def _begin_epoch(self, run: RunInfo) -> None:
        again = run.epoch != self.epoch
        self._seen = 0 if again else run.revision  # in the same epoch its events are gone
        self._run = run
        self._failed.clear()
        self._done.clear()
        self._on_durable(run.durable_step)
        if again:
            logger.warning(f"the trainer restarted: it is at step {run.step} (epoch {run.epoch})")
            self._on_restart(run)
        self._changed.beat()
