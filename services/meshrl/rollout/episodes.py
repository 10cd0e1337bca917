"""Plays the rollouts of admitted groups as tasks of the event loop and hands out what they end in.

Fed by `service` with one request a group; `groups` says what to start and what to stop, `hosting` plays, `samples`
converts. Waits for engines through `engines`; unblocks the group's stream with every rollout that ends.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from loguru import logger
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace

from meshrl.core.telemetry.tracing import ROLLOUT_SPAN, links_from, traceparent_of
from meshrl.rollout.engines.engine_table import Requirement
from meshrl.rollout.engines.logprobs_mode import reshaping
from meshrl.rollout.engines.router import EngineRouter
from meshrl.rollout.engines.sessions import Session, SessionBook
from meshrl.rollout.groups import AdmittedGroup, GroupTable, Outcome
from meshrl.rollout.hosting import HostedEnvironment
from meshrl.rollout.samples import rollouts_of, trace_uuid
from meshrl.rollout.stages import describe
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutEvent, RolloutFailure, RolloutRequest, RolloutStatus


@dataclass(eq=False)
class _Live:
    """A group that is streaming: what it plays, its tasks by rollout, its events; None in `events` ends the stream."""

    group: AdmittedGroup
    request: RolloutRequest
    environment: HostedEnvironment
    task: Task
    need: Requirement
    events: asyncio.Queue[RolloutEvent | None] = field(default_factory=asyncio.Queue)
    playing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    latest: dict[int, tuple[Trace, Session]] = field(default_factory=dict)
    """The agent's run that began last, by rollout."""

    def doing(self, index: int) -> str:
        """What a rollout does now."""
        if index not in self.playing:
            return "it waited for a place in max_concurrent"
        if index not in self.latest:
            return "it was beginning its episode"
        return f"it was {describe(*self.latest[index], time.time())}"


class Episodes:
    """The running side of the rollout service. One object a server, used from its event loop only."""

    def __init__(
        self,
        environments: Mapping[str, HostedEnvironment],
        table: GroupTable,
        router: EngineRouter,
        book: SessionBook,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environments = environments
        self._table = table
        self._router = router
        self._book = book
        self._tracer = tracer
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def environments(self) -> Mapping[str, HostedEnvironment]:
        return self._environments

    async def run(self, request: RolloutRequest) -> AsyncGenerator[RolloutEvent, None]:
        """Plays a group; yields each rollout or failure as it ends, then the summary.

        Closing the iterator cancels what still runs. Raises MeshError UNKNOWN_ENVIRONMENT, UNKNOWN_TASK,
        INVALID_REQUEST, VERSION_NOT_AVAILABLE, LOGPROBS_BIASED, DRAINING, DUPLICATE_REQUEST or OVERLOADED before the
        first event.
        """
        arrived = self._clock()
        live = await self._admit(request)
        timer = asyncio.get_running_loop().call_later(
            max(0.0, arrived + request.deadline_s - self._clock()), self._expire, live
        )
        try:
            self._pump()
            while (event := await live.events.get()) is not None:
                yield event
            yield live.group.summary
        finally:
            timer.cancel()
            self._end(live, Outcome.CANCELLED)
            self._table.remove(live.group)
            del self._live[request.request_id]
            if not self._live:
                self._idle.set()
            self._pump()

    def cancel(self, group_ids: Collection[str] = ()) -> int:
        """Stops the named groups, or all; their streams end with a summary. Returns how many rollouts were stopped."""
        groups = self._table.named(group_ids)
        stopped = sum(self._end(self._live[group.request_id], Outcome.CANCELLED) for group in groups)
        self._pump()
        return stopped

    def status(self) -> RolloutStatus:
        return RolloutStatus(
            running=self._table.running,
            queued=self._table.queued,
            finished=self._table.finished,
            failures=dict(self._table.failures),
            rollouts_per_s=self._table.rate(self._clock()),
            engines=self._router.pool.endpoints(),
            draining=self._table.draining,
        )

    async def drain(self, grace_s: float) -> None:
        """Admits no more groups, gives those that run `grace_s` seconds, then cancels them."""
        self._table.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:  # the grace is over: what still runs is cancelled below
            pass
        if stopped := self.cancel():
            logger.warning("drain: {} rollouts were cancelled after {:g} s", stopped, grace_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    async def _admit(self, request: RolloutRequest) -> _Live:
        environment = self._environments.get(request.environment)
        if environment is None:
            hosted = ", ".join(sorted(self._environments))
            raise MeshError(
                Reason.UNKNOWN_ENVIRONMENT, f"no environment {request.environment!r} here; hosted are: {hosted}"
            )
        self._table.refuse(request.request_id, request.group_id, request.group_size, self._clock())
        if request.task_payload is not None:
            task = environment.tasks.of_payload(request.task_payload)
        else:
            task = await self._task_at(environment, request)
        need = Requirement(
            pool=request.engine_pool, min_version=request.min_version, exact_version=request.exact_version
        )
        shaped = () if request.scores_only else reshaping(environment.sampling(request.sampling, 0))
        await self._router.require(replace(need, reshaped_by=shaped))
        group = self._table.admit(request.request_id, request.group_id, request.group_size, self._clock())
        live = _Live(group, request, environment, task, need)
        self._live[request.request_id] = live
        self._idle.clear()
        return live

    async def _task_at(self, environment: HostedEnvironment, request: RolloutRequest) -> Task:
        """The task by its index. Raises as `TaskSource.at` does, and DEADLINE_PASSED when it is too far to draw."""
        index = request.task_index or 0
        try:
            async with asyncio.timeout(request.deadline_s):
                return await environment.tasks.at(index)
        except TimeoutError as error:
            message = f"{_late(request)}: task {index} of {environment.name} is still being drawn; try again later"
            raise MeshError(Reason.DEADLINE_PASSED, message) from error

    def _pump(self) -> None:
        """Starts whatever has a slot now."""
        for group, index in self._table.start():
            live = self._live[group.request_id]
            task = asyncio.create_task(self._play(live, index))
            live.playing[index] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _expire(self, live: _Live) -> None:
        self._end(live, Outcome.FAILED, Reason.DEADLINE_PASSED)
        self._pump()

    def _end(self, live: _Live, outcome: Outcome, late: Reason | None = None) -> int:
        """Ends what is left of a group: counts it at once, so that the stream ends; its tasks wind up behind.

        With `late` each is a failure for that reason, which says what it was doing.
        """
        if live.group.over:
            return 0
        reason = "" if late is None else late.name
        running, waiting = self._table.end(live.group, outcome, self._clock(), reason=reason)
        if late is not None:
            lost = (*running, *waiting)
            logger.warning(
                "{} rollouts of group {} were late; {}", len(lost), live.request.group_id, live.doing(lost[0])
            )
            for index in lost:
                error = MeshError(late, f"{_late(live.request)}: {live.doing(index)}")
                live.events.put_nowait(_failure(live.request, str(uuid.uuid4()), error))
        for index in running:
            live.playing[index].cancel()
        live.events.put_nowait(None)
        return len(running) + len(waiting)

    async def _play(self, live: _Live, index: int) -> None:
        request, sessions = live.request, dict[str, Session]()
        span = self._start_span(request)
        traceparent = traceparent_of(span)

        def opened(trace: Trace) -> None:
            session = Session(
                live.need,
                request.sampling.stop_token_ids,
                traceparent,
                stream=len(sessions),
                scores_only=request.scores_only or not trace.agent.trainable,
            )
            sessions[trace.id] = session
            live.latest[index] = (trace, session)
            self._book.open(trace.id, session)

        try:
            with logger.contextualize(env=live.environment.name):
                sampling = live.environment.sampling(request.sampling, index)
                episode = await live.environment.play(live.task, sampling, opened)
            rollouts = rollouts_of(
                live.environment.env, episode, sessions, group_id=request.group_id, environment=request.environment
            )
        except asyncio.CancelledError:  # whoever cancelled has counted it, unless the loop itself is ending
            self._record_outcome(live, index, Outcome.CANCELLED)
            span.set_status(Status(StatusCode.ERROR, "cancelled"))
        except MeshError as error:
            self._fail(live, index, sessions, error)
            span.set_status(Status(StatusCode.ERROR, error.reason.name))
        except Exception as error:  # noqa: BLE001  # a rollout is one of many: what breaks in it is its own failure, reported with its type
            logger.exception("rollout {} of group {} broke", index, request.group_id)
            self._fail(live, index, sessions, MeshError(Reason.INTERNAL, f"{type(error).__name__}: {error}"))
            span.set_status(Status(StatusCode.ERROR, Reason.INTERNAL.name))
        else:
            self._finish(live, index, rollouts)
            span.set_attribute("meshrl.reward", rollouts[0].reward)
        finally:
            for session_id in sessions:
                self._book.close(session_id)
            live.playing.pop(index, None)
            live.latest.pop(index, None)
            span.end()
            self._pump()

    def _start_span(self, request: RolloutRequest) -> Span:
        """Each rollout has a trace of its own, so that it outlives the call that asked for it; a link leads back."""
        return self._tracer.start_span(
            ROLLOUT_SPAN,
            context=Context(),
            links=links_from([request.traceparent]),
            attributes={"meshrl.environment": request.environment, "meshrl.group_id": request.group_id},
        )

    def _finish(self, live: _Live, index: int, rollouts: tuple[Rollout, ...]) -> None:
        tokens = sum(int(sample.loss_mask.sum()) for rollout in rollouts for sample in rollout.samples)
        self._record_outcome(live, index, Outcome.FINISHED, rollouts, sampled_tokens=tokens)

    def _fail(self, live: _Live, index: int, sessions: dict[str, Session], error: MeshError) -> None:
        rollout_id = trace_uuid(next(reversed(sessions))) if sessions else str(uuid.uuid4())
        failure = _failure(live.request, rollout_id, error)
        if self._record_outcome(live, index, Outcome.FAILED, (failure,), reason=error.reason.name):
            logger.warning(
                "rollout {} of {} failed: {}: {}", rollout_id, live.environment.name, error.reason.name, error.message
            )

    def _record_outcome(
        self,
        live: _Live,
        index: int,
        outcome: Outcome,
        events: tuple[RolloutEvent, ...] = (),
        *,
        reason: str = "",
        sampled_tokens: int = 0,
    ) -> bool:
        """Counts how a rollout ended and streams it, unless it was ended before by a cancel or the deadline."""
        now = self._clock()
        if not self._table.record_outcome(
            live.group, index, outcome, now, reason=reason, sampled_tokens=sampled_tokens
        ):
            return False
        for event in events:
            live.events.put_nowait(event)
        if live.group.over:
            live.events.put_nowait(None)
        return True


def _late(request: RolloutRequest) -> str:
    return f"not finished within deadline_s = {request.deadline_s:g}"


def _failure(request: RolloutRequest, rollout_id: str, error: MeshError) -> RolloutFailure:
    return RolloutFailure(
        rollout_id=rollout_id,
        group_id=request.group_id,
        reason=error.reason.name,
        message=error.message,
        retryable=error.reason.retryable,
    )
