"""One place for a worker: starts its process, watches it, ends one that is stuck, and starts the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from loguru import logger

from meshrl.client.backoff import Backoff
from meshrl.core.config import ConfigError
from meshrl.core.waiting import CANCEL_DEADLINE_S
from meshrl.rollout.workers.blame import NOBODY, Culprit
from meshrl.rollout.workers.process import WorkerProcess, WorkerSettings

START_DEADLINE_S = 900.0
LIVED_WELL_S = 60.0
PAUSE_S = (0.5, 15.0)
SILENT_FACTOR = 3.0
SHORTEST_SILENCE_S = 10.0
"""A worker without any sign may be starved of the processor, unlike one that reports that it is blocked."""


@dataclass(frozen=True)
class Loss:
    """In words that follow "its worker", and whose code did it."""

    words: str
    culprit: Culprit = NOBODY


@dataclass(frozen=True)
class PlaceLimits:
    """Of a worker."""

    blocked_s: float
    max_memory_mib: int


class WorkerPlace:
    """Keeps one worker running. `hosting` gives the names that a worker of `environment` hosts, and its limits."""

    def __init__(
        self,
        settings: WorkerSettings,
        environment: str | None,
        hosting: Callable[[str | None], tuple[Collection[str], PlaceLimits]],
        on_lost: Callable[[WorkerProcess, Loss], None],
        on_change: Callable[[], None],
    ) -> None:
        self.number = settings.number
        self.environment = environment
        """None for all that share. A change holds for the next workers, its limits at once."""
        self.worker: WorkerProcess | None = None
        self.again_at_s = 0.0
        """When the next worker starts (time.monotonic), while there is none."""
        self._settings = settings
        self._hosting = hosting
        self._on_lost = on_lost
        self._on_change = on_change
        self._killed: Loss | None = None
        self._retired = False
        self._task: asyncio.Task[None] | None = None

    async def first(self) -> WorkerProcess:
        """Waits until it is ready. Raises ConfigError if it cannot be."""
        worker = await self._start()
        self._task = asyncio.create_task(self._keep(worker))
        return worker

    def keep_starting(self) -> None:
        self._task = asyncio.create_task(self._keep(None))

    async def close(self, grace_s: float) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CANCEL_DEADLINE_S)
        worker = self.worker
        if worker is None:
            return
        worker.stop()
        try:
            await asyncio.wait_for(worker.gone.wait(), grace_s)
        except TimeoutError:  # code of an environment that does not end
            worker.kill("the service ends")
        await worker.wait_gone()
        worker.close()

    def retire(self) -> None:
        self._retired = True

    def look(self) -> None:
        """Ends the worker if it is stuck or too large; called a few times a second."""
        worker = self.worker
        if worker is None or not worker.usable:
            return
        _, limits = self._hosting(self.environment)
        hold, limit_s = worker.hold(), limits.blocked_s
        silent_s = time.monotonic() - worker.heard_s
        if hold is not None and hold.culprit.environment and hold.seconds > limit_s and worker.calls:
            words = f"was replaced: its event loop was blocked for {hold.seconds:.1f} s in {hold.where}"
            self._kill(worker, Loss(words, hold.culprit))
        elif silent_s > max(SILENT_FACTOR * limit_s, SHORTEST_SILENCE_S):
            self._kill(worker, Loss(f"was replaced: nothing was heard of it for {silent_s:.0f} s"))
        elif (grown_mib := worker.grown_mib()) > (most := limits.max_memory_mib):
            self._kill(worker, Loss(f"was replaced: it took {grown_mib} MiB of memory, and max_memory_mib is {most}"))

    def forgive(self, stood_still_s: float) -> None:
        """This process itself stood still, so the worker may have reported."""
        if self.worker is not None:
            self.worker.heard_s += stood_still_s

    def _kill(self, worker: WorkerProcess, loss: Loss) -> None:
        self._killed = loss
        worker.kill(loss.words)

    async def _start(self) -> WorkerProcess:
        names, limits = self._hosting(self.environment)
        settings = replace(self._settings, names=tuple(names), max_memory_mib=limits.max_memory_mib)
        worker = self.worker = WorkerProcess(settings)
        self._killed = None
        await worker.start()
        ending = asyncio.create_task(worker.gone.wait())
        try:
            ends: set[asyncio.Future[Any]] = {worker.ready, ending}
            await asyncio.wait(ends, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            if worker.ready.done():
                worker.ready.result()
                return worker
            slow = not worker.gone.is_set()
            worker.kill("it did not start")
            how = await worker.wait_gone()
            raise ConfigError(
                f"environments {', '.join(names)}: their worker "
                + (f"was not ready after {START_DEADLINE_S:g} s" if slow else f"{how} while it loaded them")
                + f"; logs/envs/*/*/env_worker_{self.number}.log has what it printed"
            )
        except BaseException:
            if not worker.gone.is_set():
                worker.kill("its start was broken off")
            worker.close()
            self.worker = None
            raise
        finally:
            ending.cancel()

    async def _keep(self, worker: WorkerProcess | None) -> None:
        pause_s, backoff = 0.0, Backoff(*PAUSE_S, jitter=0.0)
        while True:
            if worker is None:
                self.again_at_s = time.monotonic() + pause_s
                await asyncio.sleep(pause_s)
                try:
                    worker = await self._start()
                except (ConfigError, OSError) as error:
                    logger.error("worker {} cannot be started: {}", self.number, error)
                    pause_s = backoff.next_s()
                    continue
                logger.info("worker {} has loaded {}", self.number, ", ".join(worker.settings.names))
            self._on_change()
            began_s = time.monotonic()
            how = await worker.wait_gone()
            loss = self._killed or Loss(how, worker.exiter)
            self.worker = None
            self._on_lost(worker, loss)
            worker.close()
            if self._retired:
                return
            worker = None
            if time.monotonic() - began_s > LIVED_WELL_S:
                pause_s = 0.0
                backoff.reset()
            else:
                pause_s = backoff.next_s()
