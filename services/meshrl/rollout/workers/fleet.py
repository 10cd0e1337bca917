"""All workers of the service: which environment is played where, and what happens when a worker is lost.

The players (`players`) get a worker from it for each group. Environments share the workers of `rollout.workers` unless
they ask for their own. When a shared worker is lost, the environment whose code did it gets workers of its own, so that
it costs the others nothing from then on; if the cause is unknown, each that played there gets its own, and the next
loss shows it. Where code blocks a shared worker, the worker is left to its environment for good within about a second,
and the others go on elsewhere. A standby, which has loaded the shared environments too, takes the place of a lost
worker at once, and the lost one's slot starts the next standby.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from loguru import logger

from meshrl.client.machine.memory import machine_memory
from meshrl.core.config.shared import EnvConfig
from meshrl.core.telemetry.tracing import ENDPOINT_VARIABLES
from meshrl.core.waiting import Pulse
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.deadlines.stages import overdue
from meshrl.rollout.workers.blame import NO_ROLLOUT
from meshrl.rollout.workers.process import WorkerProcess
from meshrl.rollout.workers.slot import Loss, SlotLimits, WorkerSlot
from meshrl.wire.types import EnvironmentInfo

LOOK_EVERY_S = 0.25
STOOD_STILL_S = 1.0
LEFT_AFTER_S = 1.0
"""How long code may block a shared worker before the others leave it, where there is another to go to."""
STOP_GRACE_S = 5.0
EXPORT_GRACE_S = 20.0
"""A worker that is told to end sends its last spans to the collector first, where there is one."""
MOST_WORKERS = 32
UNKNOWN_MEMORY_MIB = 4096
"""A worker's bound where nothing tells what memory the machine has."""


class WorkerFleet:
    """The workers of a service. Use as an async context manager, from one event loop."""

    def __init__(self, config: RolloutConfig) -> None:
        self._entries = {entry.resolved_name: entry for entry in config.env if config.workers or _asks_for_own(entry)}
        self._max_memory_mib = config.max_memory_mib or _half_the_memory_mib()
        self._blocked_s = config.blocked_s
        self._config = config
        own = {name: max(entry.workers or 0, 1) for name, entry in self._entries.items() if _asks_for_own(entry)}
        self._shared_names = {name for name in self._entries if name not in own}
        self._changed = Pulse()
        self._numbers = itertools.count(1)
        self._groups = itertools.count(1)
        shared = count_of(config) if self._shared_names else 0
        self._shared = [self._slot(None) for _ in range(shared)]
        self._own = {name: [self._slot(name) for _ in range(count)] for name, count in own.items()}
        self._with_standby = config.standby and shared > 0
        self._standby: WorkerSlot | None = None
        self._infos: dict[str, EnvironmentInfo] = {}
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WorkerFleet:
        """Starts all workers. Raises ConfigError when an environment cannot be loaded."""
        started = await asyncio.gather(*(slot.first() for slot in self._slots()), return_exceptions=True)
        for worker in started:
            if isinstance(worker, BaseException):
                await self.__aexit__()
                raise worker
            self._infos |= {info.name: info for info in worker.infos}
        self._start_standby()
        self._looking = asyncio.create_task(self._check_forever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._looking is not None:
            self._looking.cancel()
        grace_s = EXPORT_GRACE_S if any(os.environ.get(name) for name in ENDPOINT_VARIABLES) else STOP_GRACE_S
        await asyncio.gather(*(slot.close(grace_s) for slot in self._slots_and_standby()))

    @property
    def names(self) -> tuple[str, ...]:
        """The environments that workers play, in configured order."""
        return tuple(self._entries)

    def workers_of(self, environment: str) -> str:
        """The workers that play an environment, in words."""
        numbers = [slot.number for slot in self._slots_of(environment)]
        which = f"worker {numbers[0]}" if len(numbers) == 1 else f"workers {numbers[0]} to {numbers[-1]}"
        return which + (" of its own" if environment in self._own else "")

    def info(self, environment: str) -> EnvironmentInfo:
        return self._infos[environment]

    def in_flight(self) -> Mapping[str, int]:
        """Model calls in flight by engine, over all workers."""
        calls: Counter[str] = Counter()
        for slot in self._slots():
            if slot.worker is not None:
                calls.update(slot.worker.in_flight)
        return calls

    def next_group(self) -> int:
        """A number for a group, which no other has."""
        return next(self._groups)

    def plays_here(self, environment: str, worker: WorkerProcess) -> bool:
        """True while groups of the environment may go on in this worker."""
        return worker.usable and any(slot.worker is worker for slot in self._slots_of(environment))

    async def worker_for(self, environment: str) -> WorkerProcess:
        """The worker for the next group: the least loaded one, of those that answer where there are some. Waits for
        one that is being started."""
        while True:
            upcoming = self._changed.upcoming
            usable = [slot.worker for slot in self._slots_of(environment) if slot.worker and slot.worker.usable]
            if usable:
                return min(usable, key=lambda worker: (worker.hold() is not None, worker.load))
            await upcoming.wait()

    def waits_for(self, environment: str) -> str:
        """What a group waits for that no worker has opened yet."""
        now_s, slots = time.monotonic(), self._slots_of(environment)
        if any(slot.worker is not None and slot.worker.usable for slot in slots):
            return "waiting for a worker to find the group's task"
        soonest = min((slot.again_at_s for slot in slots), default=now_s)
        return f"waiting for a worker, the next of which starts in {max(0.0, soonest - now_s):.0f} s"

    def _slots(self) -> list[WorkerSlot]:
        return [*self._shared, *itertools.chain.from_iterable(self._own.values())]

    def _slots_and_standby(self) -> list[WorkerSlot]:
        return self._slots() if self._standby is None else [*self._slots(), self._standby]

    def _slots_of(self, environment: str) -> list[WorkerSlot]:
        return self._own.get(environment, self._shared)

    def _slot(self, environment: str | None) -> WorkerSlot:
        """A slot of one environment, or for those that share."""
        if environment is None and len(self._shared_names) == 1:
            (environment,) = self._shared_names
        if environment is None:
            limits = SlotLimits(self._blocked_s, self._max_memory_mib)
            hosts: tuple[Callable[[], Collection[str]], SlotLimits] = self._sharing, limits
        else:
            hosts = self._alone(environment)
        return WorkerSlot(next(self._numbers), self._config, *hosts, self._on_lost, self._changed.beat)

    def _alone(self, environment: str) -> tuple[Callable[[], Collection[str]], SlotLimits]:
        """What the slot of one environment starts its workers with."""
        entry, names = self._entries[environment], (environment,)
        limits = SlotLimits(entry.deadlines.blocked_s, entry.max_memory_mib or self._max_memory_mib)
        return lambda: names, limits

    def _start_standby(self) -> None:
        """Has a worker ready where environments share: one that they lose would hold the others up."""
        if self._with_standby and self._standby is None and len(self._shared_names) > 1:
            self._standby = self._slot(None)
            self._standby.keep_starting()

    def _sharing(self) -> tuple[str, ...]:
        return tuple(name for name in self._entries if name in self._shared_names)

    def _on_lost(self, worker: WorkerProcess, loss: Loss) -> None:
        """Finds out whose doing it was, moves that environment where others shared the worker, and answers for what
        the worker had."""
        hosted, number = worker.settings.names, worker.settings.number
        busy = {assigned.environment for assigned in worker.rollouts.values()}
        busy |= {environment for environment, _ in worker.groups.values()}
        suspects = {loss.culprit.environment} if loss.culprit.environment else busy
        known = len(suspects) == 1
        causes = {name: f"environment {name}: its worker {number} {loss.words}" for name in busy}
        for name in suspects if known else ():
            logger.bind(env=name).error("environment {}: its worker {} {}", name, number, loss.words)
        if not known:
            names = ", ".join(sorted(suspects)) or "nothing"
            logger.error("worker {}, which played {}, {}", number, names, loss.words)
        sharing = self._shared_names.intersection(hosted)
        if len(sharing) > 1:
            played: Counter[str] = Counter()
            for environment, size in worker.groups.values():
                played[environment] += size
            for name in sorted(suspects & sharing, key=lambda name: (-played[name], name)):
                self._move_out(name, known=known)
        self._replace(number)
        self._start_standby()
        worker.lose(causes, loss.culprit)
        self._changed.beat()

    def _move_out(self, name: str, *, known: bool) -> None:
        """Gives an environment a worker of its own from now on."""
        self._shared_names.discard(name)
        if self._standby is not None and not known:  # what played most goes on at once
            slot, self._standby = self._standby, None
            slot.host(*self._alone(name))
        else:
            slot = self._slot(name)
            slot.keep_starting()
        self._own[name] = [slot]
        why = "so that others keep their pace" if known else "to find out whose code it was"
        logger.bind(env=name).warning(
            "environment {} gets worker {} of its own, {}; isolated = true does so from the start",
            name, slot.number, why,
        )  # fmt: skip

    def _leave_to_blocker(self, slot: WorkerSlot) -> None:
        """Has the others go on elsewhere while the code of one environment blocks a worker that they share.

        Where the standby is ready it takes the worker's place, and the blocker keeps the worker as its own.
        """
        worker, standby = slot.worker, self._standby
        hold = worker.hold() if worker is not None and worker.usable else None
        if worker is None or hold is None or not hold.culprit.environment or hold.seconds < LEFT_AFTER_S:
            return
        name, ready = (
            hold.culprit.environment,
            standby is not None and standby.worker is not None and standby.worker.usable,
        )
        if standby is not None and ready and name in self._shared_names and len(self._shared_names) > 1:
            logger.info("worker {} takes the place of worker {}", standby.number, slot.number)
            self._shared[self._shared.index(slot)], self._standby = standby, None
            self._shared_names.discard(name)
            self._own[name] = [slot]
            slot.host(*self._alone(name))
            logger.bind(env=name).warning(
                "environment {} keeps worker {}, which it blocks in {}, to itself, so that others keep their pace;"
                " isolated = true gives it one from the start", name, slot.number, hold.where,
            )  # fmt: skip
            self._start_standby()
        elif not any(one.worker and one.worker.usable and not one.worker.hold() for one in self._shared):
            return  # there is nowhere to go
        worker.leave_to(name)
        self._changed.beat()

    def _replace(self, number: int) -> None:
        """Puts the standby in the place of the shared worker `number`, which is lost."""
        lost = next((slot for slot in self._shared if slot.number == number), None)
        if lost is None:  # it was not shared, or stood by
            return
        if self._standby is not None:
            logger.info("worker {} takes the place of worker {}", self._standby.number, number)
            self._shared[self._shared.index(lost)], self._standby = self._standby, lost
        elif not self._shared_names:
            self._shared.remove(lost)
        if len(self._shared_names) < 2 and lost not in self._shared:
            lost.retire()
            self._standby = None

    async def _check_forever(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = time.monotonic()
            stood_still_s = now_s - looked_s - LOOK_EVERY_S
            looked_s = now_s
            for slot in self._slots_and_standby():
                if stood_still_s > STOOD_STILL_S:
                    slot.forgive(stood_still_s)
                    continue
                if slot in self._shared:
                    self._leave_to_blocker(slot)
                slot.look()
                if slot.worker is not None and (slot.worker.hold() is not None or now_s - slot.worker.heard_s > 1.0):
                    self._end_overdue(slot.worker)

    def _end_overdue(self, worker: WorkerProcess) -> None:
        """Gives rollouts up that are overdue in a worker that cannot do so itself: its event loop stands still.

        One that another holds up is not late by its own doing, and is played again when the worker is replaced.
        """
        now_s, hold = time.time(), worker.hold()
        for (group, index), assigned in list(worker.rollouts.items()):
            if hold is not None and hold.culprit.rollout not in (NO_ROLLOUT, (group, index)):
                continue
            deadlines = self._entries[assigned.environment].deadlines
            late = overdue(deadlines, assigned.stage, assigned.began_s, now_s)
            if late and not assigned.answer.done():
                stage = worker.stage(group, index) or assigned.stage
                worker.give_up(group, index, f"{late}: {stage.describe(now_s)} ({stage.worker})")


def _asks_for_own(entry: EnvConfig) -> bool:
    return entry.isolated or entry.workers is not None or entry.max_memory_mib is not None


def count_of(config: RolloutConfig) -> int:
    """How many workers the environments share."""
    if config.workers != "auto":
        return config.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - max(2, cores // 4), MOST_WORKERS))


def _half_the_memory_mib() -> int:
    memory = machine_memory()
    return memory.total >> 21 if memory is not None else UNKNOWN_MEMORY_MIB
