"""Runs admitted groups: starts their rollouts as places come free, streams the results, ends what is late.

With worker processes the front has one runner, whose players call the workers, and so has each worker.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loguru import logger

from meshrl.core.telemetry.waits import CountedWait
from meshrl.core.waiting import set_within
from meshrl.rollout.engines.capacity import EpisodeSizes, RolloutLimit
from meshrl.rollout.engines.engine_table import Requirement
from meshrl.rollout.engines.logprobs_mode import reshaping
from meshrl.rollout.groups import Admissions, AdmittedGroup, Outcome, late, rollout_failure
from meshrl.rollout.player import EpisodeResult, Episodes, Player, SerializedRollouts
from meshrl.rollout.stages import BEGINNING, RolloutStage
from meshrl.rollout.trouble_log import LOOK_EVERY_S, FailureLog, WaitingReport, log_waiting
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import RolloutEvent, RolloutFailure, RolloutRequest, RolloutStatus

if TYPE_CHECKING:
    from meshrl.rollout.engines.chat_servers import ChatServers
    from meshrl.rollout.engines.router import EngineRouter

Emit = Callable[[bytes], None]
"""Gets each event of a group, as a RunRolloutsResponse."""


def serialized(*events: RolloutEvent) -> Iterator[bytes]:
    return (message.SerializeToString() for event in events for message in convert.rollout_messages(event))


@dataclass(eq=False)
class _Playing:
    group: AdmittedGroup
    opened: Episodes
    emit: Emit
    over: asyncio.Event = field(default_factory=asyncio.Event)
    playing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    has_begun: bool = False
    """True once it has streamed something; until then it may be refused."""
    refusal: Exception | None = None

    def doing(self, index: int) -> str:
        if index not in self.playing:
            return "it waited for a place in max_concurrent"
        stage = self.opened.stage(index)
        return f"it was {BEGINNING}" if stage is None else stage.describe(time.time())


class RolloutRunner:
    """One object a server, used from its event loop only."""

    def __init__(
        self,
        environments: Mapping[str, Player],
        table: Admissions,
        servers: EngineRouter | ChatServers,
        limit: RolloutLimit,
        in_flight: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`in_flight`: model calls at each engine by the players of other processes."""
        self.environments = environments
        self._limit = limit
        self._table = table
        self._servers = servers
        self._in_flight = in_flight
        self._running: dict[str, _Playing] = {}  # by request id
        self._tasks: set[asyncio.Task[None]] = set()
        self._counted: set[str] = set()  # engines of the limit that the log has told last
        self._failures = FailureLog()
        self._idle = asyncio.Event()
        self._idle.set()
        self._follow_engines()
        servers.on_look = self._follow_engines

    async def run(self, request: RolloutRequest, emit: Emit) -> None:
        """Plays a group: `emit` gets each rollout or failure as it ends, then the summary. The deadline counts from
        this call; a group that passes it, even while waiting for its task or an engine, ends with failures. Cancelling
        the call cancels the rest. Raises MeshError UNKNOWN_ENVIRONMENT, UNKNOWN_TASK, INVALID_REQUEST,
        VERSION_NOT_AVAILABLE, LOGPROBS_BIASED, DRAINING, DUPLICATE_REQUEST or OVERLOADED before the first event, and
        the errors of `emit`."""
        arrived = time.monotonic()
        try:
            running = await self._admit(request, emit)
        except MeshError as error:
            if error.reason is not Reason.DEADLINE_PASSED:
                raise
            self._end_before_it_began(request, error, emit)
            return
        left_s = max(0.0, arrived + request.deadline_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s + running.opened.late_s, self._end_late, running)
        try:
            self._start_waiting()
            await running.over.wait()
            if running.refusal is not None:
                raise running.refusal
            for message in serialized(running.group.summary):
                emit(message)
        finally:
            timer.cancel()
            self._cancel(running)
            self._table.remove(running.group)
            running.opened.close()
            del self._running[request.request_id]
            if not self._running:
                self._idle.set()
            self._start_waiting()

    def cancel(self, group_ids: Collection[str] = ()) -> int:
        """Stops the named groups, or all; their streams end with a summary. Returns the number of stopped rollouts."""
        groups = self._table.named(group_ids)
        stopped = sum(self._cancel(self._running[group.request.request_id]) for group in groups)
        self._start_waiting()
        return stopped

    async def report_waits(self, say: Callable[[str, str], None] = log_waiting) -> None:
        """Until cancelled, reports the longest waits (`say` gets the environment and a line), and logs counts of
        repeated failures."""
        report = WaitingReport(say)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            report.look(((environment, stage) for _, environment, stage in self._doing()), time.time())
            self._failures.log_counts(time.monotonic())

    def waits(self) -> Iterator[CountedWait]:
        for key, environment, stage in self._doing():
            yield stage.wait(key, environment)

    def _doing(self) -> Iterator[tuple[tuple[str, int], str, RolloutStage]]:
        for running in self._running.values():
            for index in running.playing:
                if (stage := running.opened.stage(index)) is not None:
                    yield (running.group.request.request_id, index), running.group.request.environment, stage

    def status(self) -> RolloutStatus:
        endpoints, calls = self._servers.engines.endpoints(), self._in_flight()
        return RolloutStatus(
            running=self._table.running,
            queued=self._table.queued,
            finished=self._table.finished,
            failures=dict(self._table.failures),
            rollouts_per_s=self._table.rate(time.monotonic()),
            engines=tuple(
                replace(engine, in_flight=engine.in_flight + calls.get(engine.url, 0)) for engine in endpoints
            ),
            draining=self._table.draining,
            max_concurrent=self._table.max_concurrent,
            limit_reason=self._limit.reason,
        )

    async def drain(self, grace_s: float | None) -> int:
        """Admits no more groups, gives running ones `grace_s` seconds (None: any number), then cancels them. Returns
        the number of cancelled rollouts."""
        self._table.draining = True
        await set_within(self._idle, grace_s)
        if stopped := self.cancel():
            logger.warning("drain: {} rollouts were cancelled after {:g} s", stopped, grace_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        self._failures.log_counts(time.monotonic(), every_s=0.0)
        return stopped

    async def _admit(self, request: RolloutRequest, emit: Emit) -> _Playing:
        player = self.environments.get(request.environment)
        if player is None:
            hosted = ", ".join(sorted(self.environments))
            raise MeshError(
                Reason.UNKNOWN_ENVIRONMENT, f"no environment {request.environment!r} here; hosted are: {hosted}"
            )
        self._table.refuse(request, time.monotonic())
        opened: Episodes | None = None
        limit = asyncio.timeout(request.deadline_s)
        try:
            async with limit:
                opened = await player.open(request)
                sampling = request.sampling.over(player.info.default_sampling)
                shaped = () if request.scores_only else reshaping(sampling)
                await self._servers.require(replace(Requirement.of(request), reshaped_by=shaped))
            group = self._table.admit(request, time.monotonic())
        except BaseException as error:  # refused, late, or the caller has gone
            if opened is not None:
                opened.close()
            if not (isinstance(error, TimeoutError) and limit.expired()):
                raise
            waits = player.opening(request) if opened is None else "no engine that may answer was found yet"
            raise MeshError(Reason.DEADLINE_PASSED, f"{late(request)}: {waits}") from error
        running = self._running[request.request_id] = _Playing(group, opened, emit)
        self._idle.clear()
        return running

    def _follow_engines(self) -> None:
        engines = [engine for engine in self._servers.engines.listed if engine.healthy]
        if self._limit.follow(engines):
            up = {engine.url for engine in engines}
            log = logger.debug if up == self._counted else logger.info
            log("at most {} rollouts run at once: {}", self._limit.rollouts, self._limit.reason)
            self._counted = up
        self._table.max_concurrent = self._limit.rollouts
        self._start_waiting()

    def _start_waiting(self) -> None:
        for group, index in self._table.start():
            running = self._running[group.request.request_id]
            task = asyncio.create_task(self._play(running, index))
            running.playing[index] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, running: _Playing, index: int) -> None:
        try:
            played = await running.opened.play(index)
        except MeshError as error:
            if running.has_begun:
                self._record(running, index, rollout_failure(running.group.request, error, str(uuid.uuid4())))
            elif not running.group.over:
                self._refuse(running, error)
        except asyncio.CancelledError:  # whoever cancelled has counted it, unless the loop itself is ending
            recorded = self._table.record_outcome(running.group, index, Outcome.CANCELLED, time.monotonic())
            if recorded and running.group.over:
                running.over.set()
        else:
            self._record(running, index, played)
        finally:
            running.playing.pop(index, None)
            self._start_waiting()

    def _record(self, running: _Playing, index: int, played: EpisodeResult) -> None:
        group, now = running.group, time.monotonic()
        if isinstance(played, RolloutFailure):
            recorded = self._table.record_outcome(group, index, Outcome.FAILED, now, reason=played.reason)
        else:
            if isinstance(played, SerializedRollouts):
                tokens = played.sampled_tokens
                if self._limit.follows_engines:  # else they are passed on unread
                    self._limit.take(EpisodeSizes.of_messages(played.messages))
            else:
                sizes = EpisodeSizes.of(played)
                tokens = sizes.sampled_tokens
                self._limit.take(sizes)
            recorded = self._table.record_outcome(group, index, Outcome.FINISHED, now, sampled_tokens=tokens)
        if not recorded:
            return
        running.has_begun = True
        if isinstance(played, RolloutFailure):
            self._emit(running, serialized(played))
            self._failures.add(running.group.request.environment, played, now)
        else:
            self._emit(running, played.messages if isinstance(played, SerializedRollouts) else serialized(*played))
        if group.over:
            running.over.set()

    def _emit(self, running: _Playing, messages: Iterable[bytes]) -> None:
        try:
            for message in messages:
                running.emit(message)
        except Exception as error:  # noqa: BLE001  # such as text that no message can hold; raised by `run`
            self._refuse(running, error)

    def _refuse(self, running: _Playing, error: Exception) -> None:
        running.refusal = error
        self._cancel(running)
        running.over.set()

    def _end_before_it_began(self, request: RolloutRequest, error: MeshError, emit: Emit) -> None:
        now = time.monotonic()
        group = self._table.admit(request, now)
        self._table.end(group, Outcome.FAILED, now, reason=error.reason.name)
        self._table.remove(group)
        logger.bind(env=request.environment).warning(
            "{} rollouts of group {} of {} were late: {}",
            request.group_size, request.group_id, request.environment, error.message,
        )  # fmt: skip
        failures = [rollout_failure(request, error, str(uuid.uuid4())) for _ in range(request.group_size)]
        for message in serialized(*failures, group.summary):
            emit(message)

    def _end_late(self, running: _Playing) -> None:
        if running.group.over:
            return
        reason, request = Reason.DEADLINE_PASSED, running.group.request
        playing, waiting = self._table.end(running.group, Outcome.FAILED, time.monotonic(), reason=reason.name)
        lost = (*playing, *waiting)
        said = "{} rollouts of group {} of {} were late; {}"
        logger.bind(env=request.environment).warning(
            said, len(lost), request.group_id, request.environment, running.doing(lost[0])
        )
        for index in lost:
            error = MeshError(reason, f"{late(request)}: {running.doing(index)}")
            self._emit(running, serialized(rollout_failure(request, error, str(uuid.uuid4()))))
        self._stop(running, playing)
        self._start_waiting()

    def _cancel(self, running: _Playing) -> int:
        """Counts the rest of a group as cancelled at once, so that its stream ends; its tasks end behind that."""
        if running.group.over:
            return 0
        playing, waiting = self._table.end(running.group, Outcome.CANCELLED, time.monotonic())
        self._stop(running, playing)
        return len(playing) + len(waiting)

    @staticmethod
    def _stop(running: _Playing, playing: Collection[int]) -> None:
        for index in playing:
            running.playing[index].cancel()
        running.over.set()
