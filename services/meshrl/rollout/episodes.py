"""Plays the episodes of one group in this process: from its task to rollouts that training can use."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from loguru import logger
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, use_span
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace

from meshrl.core.config.shared import StageDeadlinesConfig
from meshrl.core.telemetry.tracing import ROLLOUT_SPAN, traceparent_of
from meshrl.rollout.engines.calls import Session
from meshrl.rollout.engines.chat_servers import ChatServers, refuse_training, refuse_without_tokens
from meshrl.rollout.engines.engine_table import Requirement
from meshrl.rollout.groups import rollout_failure
from meshrl.rollout.hosting import HostedEnvironment, PolicyClient
from meshrl.rollout.rendering.text_samples import TextSamples
from meshrl.rollout.samples import rollouts_of, trace_uuid
from meshrl.rollout.stages import BEGINNING, RolloutStage, StageKind, overdue, shortest_s
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import links_from
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutFailure, RolloutRequest

LOOK_EVERY_S = 1.0
CLEAN_UP_S = 10.0
STOOD_STILL_S = 0.5
"""A look that comes later than this was held up by code that blocked the event loop."""


class EpisodePlayer:
    """Plays groups of one environment, and ends each overdue episode by `deadlines`. `text` makes samples of a model
    without tokens."""

    def __init__(
        self,
        hosted: HostedEnvironment,
        client: PolicyClient,
        tracer: Tracer,
        deadlines: StageDeadlinesConfig,
        *,
        text: TextSamples | None = None,
    ) -> None:
        self.hosted, self.client, self.tracer, self.text = hosted, client, tracer, text
        self.deadlines = deadlines
        shortest = shortest_s(deadlines)
        self.look_every_s = None if shortest is None else min(LOOK_EVERY_S, shortest / 4)
        """Seconds between two looks for overdue episodes; None without deadlines."""
        self.ending: set[asyncio.Task[tuple[Rollout, ...] | RolloutFailure]] = set()

    @property
    def info(self) -> EnvironmentInfo:
        return self.hosted.info

    async def open(self, request: RolloutRequest) -> LocalEpisodes:
        """Finds the group's task. Raises MeshError UNKNOWN_TASK, INVALID_REQUEST or ENVIRONMENT_FAILED."""
        if self.text is None and isinstance(self.client, ChatServers):
            refuse_training(request)
        tasks = self.hosted.tasks
        if request.task_payload is not None:
            task = tasks.of_payload(request.task_payload)
        else:
            task = await tasks.at(request.task_index or 0)
        return LocalEpisodes(self, task, request)

    def opening(self, request: RolloutRequest) -> str:
        return f"task {request.task_index} of {self.hosted.name} was still being drawn; a later group may get it"


class LocalEpisodes:
    late_s = 0.0

    def __init__(self, player: EpisodePlayer, task: Task, request: RolloutRequest) -> None:
        self._player = player
        self._hosted, self._client = player.hosted, player.client
        self._task = task
        self._request = request
        self._need = Requirement.of(request)
        self._playing: dict[int, _Progress] = {}

    async def play(self, index: int) -> tuple[Rollout, ...] | RolloutFailure:
        """Plays episode `index` to its end. An overdue one is abandoned with its stage, and its task ends behind that;
        time in which code blocked the event loop counts for no rollout. Raises nothing but CancelledError."""
        if (look_every_s := self._player.look_every_s) is None:
            return await self._episode(index)
        began_s, stage_began_s, stage_still_s = time.time(), 0.0, 0.0
        playing = asyncio.create_task(self._episode(index))
        try:
            while True:
                look_s = time.monotonic() + look_every_s
                await asyncio.wait({playing}, timeout=look_every_s)
                if playing.done():
                    return await playing
                stage = self.stage(index)
                if stage is None:
                    continue
                if stage.began_s != stage_began_s:
                    stage_began_s, stage_still_s = stage.began_s, 0.0
                if (still_s := time.monotonic() - look_s) > STOOD_STILL_S:  # it could not go on meanwhile
                    began_s, stage_still_s = began_s + still_s, stage_still_s + still_s
                now_s = time.time()
                in_time = replace(stage, began_s=stage.began_s + stage_still_s)
                if late := overdue(self._player.deadlines, in_time, began_s, now_s):
                    self._give_up(playing)
                    error = MeshError(Reason.DEADLINE_PASSED, f"{late}: {stage.describe(now_s)}")
                    return rollout_failure(self._request, error, str(uuid.uuid4()))
        except asyncio.CancelledError:
            self._give_up(playing)
            await asyncio.wait({playing}, timeout=CLEAN_UP_S)
            raise

    def _give_up(self, playing: asyncio.Task[tuple[Rollout, ...] | RolloutFailure]) -> None:
        """Does not wait, since an episode may hold on to its cancellation for long."""
        playing.cancel()
        self._player.ending.add(playing)
        playing.add_done_callback(self._player.ending.discard)

    async def _episode(self, index: int) -> tuple[Rollout, ...] | RolloutFailure:
        await self._client.pace.turn()  # groups may come a hundred at a time
        sessions: dict[str, Session] = {}
        request = self._request
        self._playing[index] = _Progress()
        # A trace of its own, so that it outlives the call that asked for it; a link leads back.
        span = self._player.tracer.start_span(
            ROLLOUT_SPAN,
            context=Context(),
            links=links_from([request.traceparent]),
            attributes={"meshrl.environment": request.environment, "meshrl.group_id": request.group_id},
        )
        try:
            with logger.contextualize(env=self._hosted.name), _current(span):
                sampling = self._hosted.sampling(request.sampling, index)
                open_session = partial(self._open_session, index, sessions, traceparent_of(span))
                episode = await self._hosted.play(self._task, sampling, open_session)
            rollouts = rollouts_of(
                self._hosted.env,
                episode,
                sessions,
                group_id=request.group_id,
                environment=request.environment,
                conversations=request.conversations,
            )
            if (text := self._player.text) is not None:
                traces = {trace_uuid(trace.id): trace for trace in episode.traces}
                rollouts = tuple([replace(one, samples=await text.of(traces[one.rollout_id])) for one in rollouts])
            if not request.scores_only:
                refuse_without_tokens(rollouts)
            _describe(span, rollouts, sessions)
            return rollouts
        except BaseException as error:  # what breaks in a rollout is its own failure, reported with its type
            if isinstance(error, asyncio.CancelledError) and _asked_to_end():
                span.set_status(Status(StatusCode.ERROR, "cancelled"))
                raise
            if not isinstance(error, Exception):  # an exit of the program, or a cancellation that nobody asked for
                error = MeshError(Reason.ENVIRONMENT_FAILED, f"the environment's code raised {error!r}")
            elif not isinstance(error, MeshError):
                with _current(span):
                    logger.exception("rollout {} of group {} broke", index, request.group_id)
                error = MeshError(Reason.INTERNAL, f"{type(error).__name__}: {error}")
            span.set_status(Status(StatusCode.ERROR, error.reason.name))
            rollout_id = trace_uuid(next(reversed(sessions))) if sessions else str(uuid.uuid4())
            return rollout_failure(request, error, rollout_id, traceparent_of(span))
        finally:
            for session_id in sessions:
                self._client.book.pop(session_id, None)
            self._playing.pop(index, None)
            span.end()

    def stage(self, index: int) -> RolloutStage | None:
        progress = self._playing.get(index)
        return None if progress is None else progress.stage(time.time())

    def close(self) -> None:
        """Nothing is held beyond the episodes."""

    def _open_session(self, index: int, sessions: dict[str, Session], traceparent: str, trace: Trace) -> None:
        request = self._request
        session = Session(
            self._need,
            request.sampling.stop_token_ids,
            traceparent,
            stream=len(sessions),
            seq_len=self._hosted.seq_len,
            scores_only=request.scores_only or not trace.agent.trainable,
            keeps_routes=request.routed_experts and trace.agent.trainable,
            group_id=request.group_id,
        )
        sessions[trace.id] = self._client.book[trace.id] = session
        if (progress := self._playing.get(index)) is not None:
            progress.latest = (trace, session)


class _Progress:
    """How far an episode is: `latest` is the agent's run that began last."""

    def __init__(self) -> None:
        self.latest: tuple[Trace, Session] | None = None
        self._began_s = time.time()
        self._turn: tuple[str, int] = ("", 0)
        self._turn_began_s = 0.0

    def stage(self, now_s: float) -> RolloutStage:
        """`now_s` is time.time(). A turn begins when it is first seen."""
        if self.latest is None:
            return RolloutStage(BEGINNING, self._began_s, StageKind.SETUP)
        found, (_, session) = stage_of(*self.latest), self.latest
        if found.kind is not StageKind.TURN:
            return found
        turn = (found.what, len(session.calls))
        if turn != self._turn:
            self._turn, self._turn_began_s = turn, found.began_s if not self._turn[0] else now_s
        return RolloutStage(found.what, self._turn_began_s, found.kind)


def stage_of(trace: Trace, session: Session) -> RolloutStage:
    """An agent's stage by the times that verifiers stamps on the trace; within the agent's own stage the session knows
    the call."""
    timing = trace.timing
    setup, scoring = StageKind.SETUP, StageKind.SCORING
    stages = (
        ("between two runs of its agents, or in the environment's finalize", timing.scoring.end, scoring),
        ("in its rewards and metrics", timing.scoring.start, scoring),
        ("in the task's finalize", timing.finalize.start, scoring),
        ("closing its tools", timing.agent.end, scoring),
        (session.doing or "in its harness, between two model calls", timing.agent.start, StageKind.TURN),
        (
            "starting its tool servers" if session.reachable else "in the set-up of task and harness",
            timing.setup.start,
            setup,
        ),
        ("starting its runtime", timing.boot.start, setup),
        ("beginning", timing.start, setup),
    )
    return next(RolloutStage(what, began_s, kind) for what, began_s, kind in stages if began_s)


def _describe(span: Span, rollouts: tuple[Rollout, ...], sessions: Mapping[str, Session]) -> None:
    if not span.is_recording():
        return
    versions = {part.version for rollout in rollouts for sample in rollout.samples for part in sample.version_spans}
    span.set_attribute("meshrl.task", rollouts[0].task_key)
    span.set_attribute("meshrl.reward", rollouts[0].reward)
    span.set_attribute("meshrl.rollout_ids", [rollout.rollout_id for rollout in rollouts])
    span.set_attribute("meshrl.versions", sorted(versions))
    for link in links_from(sorted(set().union(*(session.syncs for session in sessions.values())))):
        span.add_link(link.context)


def _current(span: Span) -> AbstractContextManager[Span]:
    return use_span(span, record_exception=False, set_status_on_exception=False)


def _asked_to_end() -> bool:
    """False for a CancelledError that an environment raised."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
