"""Plays the episodes of one group in this process: from its task to rollouts that training can use.

Asked by `group_runner`, which knows nothing of environments. `hosting` runs verifiers' side of an episode, the model
client in `engines` samples its turns and writes each call into a session, `samples` makes rollouts of both.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from loguru import logger
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, Tracer
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace

from meshrl.core.telemetry.tracing import ROLLOUT_SPAN, links_from, traceparent_of
from meshrl.rollout.engines.chat_servers import refuse_without_tokens
from meshrl.rollout.engines.engine_table import Requirement
from meshrl.rollout.engines.sessions import Session, SessionBook
from meshrl.rollout.groups import late, rollout_failure
from meshrl.rollout.hosting import HostedEnvironment
from meshrl.rollout.samples import rollouts_of, trace_uuid
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutFailure, RolloutRequest


class EpisodePlayer:
    """Plays groups of one environment that this process hosts."""

    def __init__(self, hosted: HostedEnvironment, book: SessionBook, tracer: Tracer) -> None:
        self.hosted = hosted
        self._book = book
        self._tracer = tracer

    @property
    def info(self) -> EnvironmentInfo:
        return self.hosted.info

    async def open(self, request: RolloutRequest) -> GroupEpisodes:
        """Finds the group's task. Raises MeshError UNKNOWN_TASK, INVALID_REQUEST or ENVIRONMENT_FAILED as `TaskSource`
        does, and DEADLINE_PASSED when an infinite taskset cannot be drawn so far in time.
        """
        self.hosted.check(request)
        tasks, index = self.hosted.tasks, request.task_index or 0
        if request.task_payload is not None:
            task = tasks.of_payload(request.task_payload)
        else:
            try:
                async with asyncio.timeout(request.deadline_s):
                    task = await tasks.at(index)
            except TimeoutError as error:
                drawing = f"task {index} of {self.hosted.name} is still being drawn; try again later"
                raise MeshError(Reason.DEADLINE_PASSED, f"{late(request)}: {drawing}") from error
        return GroupEpisodes(self.hosted, task, request, self._book, self._tracer)


class GroupEpisodes:
    """The episodes of one group: one task, `group_size` times."""

    def __init__(
        self, hosted: HostedEnvironment, task: Task, request: RolloutRequest, book: SessionBook, tracer: Tracer
    ) -> None:
        self._hosted = hosted
        self._task = task
        self._request = request
        self._book = book
        self._tracer = tracer
        self._need = Requirement.of(request)
        self._latest: dict[int, tuple[Trace, Session]] = {}  # the agent's run that began last, by episode

    async def play(self, index: int) -> tuple[Rollout, ...] | RolloutFailure:
        """Plays episode `index` to its end: a rollout for each agent that trains, or why there are none.

        Raises nothing but CancelledError.
        """
        sessions: dict[str, Session] = {}
        request = self._request
        # A trace of its own, so that it outlives the call that asked for it; a link leads back.
        span = self._tracer.start_span(
            ROLLOUT_SPAN,
            context=Context(),
            links=links_from([request.traceparent]),
            attributes={"meshrl.environment": request.environment, "meshrl.group_id": request.group_id},
        )
        try:
            with logger.contextualize(env=self._hosted.name):
                sampling = self._hosted.sampling(request.sampling, index)
                on_trace = self._session_opener(index, sessions, traceparent_of(span))
                episode = await self._hosted.play(self._task, sampling, on_trace)
            rollouts = rollouts_of(
                self._hosted.env, episode, sessions, group_id=request.group_id, environment=request.environment
            )
            if not request.scores_only:
                refuse_without_tokens(rollouts)
            span.set_attribute("meshrl.reward", rollouts[0].reward)
            return rollouts
        except asyncio.CancelledError:
            span.set_status(Status(StatusCode.ERROR, "cancelled"))
            raise
        except Exception as error:  # noqa: BLE001  # a rollout is one of many: what breaks in it is its own failure, reported with its type
            if not isinstance(error, MeshError):
                logger.exception("rollout {} of group {} broke", index, request.group_id)
                error = MeshError(Reason.INTERNAL, f"{type(error).__name__}: {error}")
            span.set_status(Status(StatusCode.ERROR, error.reason.name))
            rollout_id = trace_uuid(next(reversed(sessions))) if sessions else str(uuid.uuid4())
            return rollout_failure(request, error, rollout_id)
        finally:
            for session_id in sessions:
                self._book.close(session_id)
            self._latest.pop(index, None)
            span.end()

    def doing(self, index: int) -> str:
        """What an episode that is being played does now, for the message of whoever ends it."""
        if index not in self._latest:
            return "it was beginning its episode"
        return f"it was {stage_of(*self._latest[index], time.time())}"

    def _session_opener(self, index: int, sessions: dict[str, Session], traceparent: str) -> Callable[[Trace], None]:
        """What verifiers calls with the trace of each agent's run as it begins: the run gets a session."""
        request = self._request

        def open_session(trace: Trace) -> None:
            session = Session(
                self._need,
                request.sampling.stop_token_ids,
                traceparent,
                stream=len(sessions),
                scores_only=request.scores_only or not trace.agent.trainable,
            )
            sessions[trace.id] = session
            self._latest[index] = (trace, session)
            self._book.open(trace.id, session)

        return open_session


def stage_of(trace: Trace, session: Session, now_s: float) -> str:
    """What an agent's run does at `now_s` (time.time) and for how long its stage has lasted.

    verifiers stamps the begin of each stage on the trace; within the agent's stage the session knows the call.
    """
    timing = trace.timing
    stages = (
        ("between two runs of its agents, or in the environment's finalize", timing.scoring.end),
        ("in its rewards and metrics", timing.scoring.start),
        ("in the task's finalize", timing.finalize.start),
        ("closing its tools", timing.agent.end),
        (session.doing or "in its harness, between two model calls", timing.agent.start),
        ("starting its tool servers" if session.reachable else "in the set-up of task and harness", timing.setup.start),
        ("starting its runtime", timing.boot.start),
        ("beginning", timing.start),
    )
    what, began_s = next((what, began_s) for what, began_s in stages if began_s)
    return f"{what}, {max(0.0, now_s - began_s):.1f} s into this stage"
