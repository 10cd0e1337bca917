"""Plays groups: at most so many rollouts at once, each ends as a rollout or a failure, the summary comes last."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.repeated_requests import SeenRequests
from meshrl.wire.types import (
    Rollout,
    RolloutEvent,
    RolloutFailure,
    RolloutRequest,
    RolloutStatus,
    RolloutSummary,
)
from meshrl_verifiers_v0.engines import ChatEngines
from meshrl_verifiers_v0.hosting import HostedOldEnv, Row, as_mesh_error

RATE_WINDOW_S = 60.0


@dataclass(eq=False)
class PlayedGroup:
    """`ended`: rollouts that came back, by how."""

    request: RolloutRequest
    events: asyncio.Queue[Rollout | MeshError | None] = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    @property
    def left(self) -> int:
        return self.request.group_size - self.ended.total()

    def stop(self, how: str) -> int:
        """Ends the rest as cancelled, or as failed because late. Returns how many rollouts that were."""
        left = self.left
        for task in self.tasks:
            task.cancel()
        for _ in range(left if how == "failed" else 0):
            late = f"not finished within deadline_s = {self.request.deadline_s:g}"
            self.events.put_nowait(MeshError(Reason.DEADLINE_PASSED, late))
        if how == "cancelled":
            self.ended[how] += left
        self.events.put_nowait(None)
        return left


class GroupPlayer:
    """Used from its event loop only."""

    def __init__(self, environments: Mapping[str, HostedOldEnv], engines: ChatEngines, max_concurrent: int) -> None:
        self.environments = environments
        self._engines = engines
        self._places = asyncio.Semaphore(max_concurrent)
        self._groups: dict[str, PlayedGroup] = {}
        self._seen = SeenRequests()
        self._finished_at: deque[float] = deque()
        self._running = 0
        self._finished = 0
        self._failures: Counter[str] = Counter()
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, request: RolloutRequest) -> AsyncIterator[RolloutEvent]:
        """Yields each rollout or failure, then the summary. Closing it cancels the group. Raises MeshError."""
        env, row = self._admitted(request)
        group = self._groups[request.group_id] = PlayedGroup(request)
        self._idle.clear()
        timer = asyncio.get_running_loop().call_later(request.deadline_s, group.stop, "failed")
        try:
            if env.scores_groups:
                group.tasks.add(asyncio.create_task(self._whole(group, env, row)))
            else:
                group.tasks |= {
                    asyncio.create_task(self._one(group, env, row, index)) for index in range(request.group_size)
                }
            while group.left and (event := await group.events.get()) is not None:
                yield self._counted(group, event)
            ended = group.ended
            yield RolloutSummary(
                finished=ended["finished"],
                failed=ended["failed"],
                cancelled=ended["cancelled"],
                sampled_tokens=group.tokens,
            )
        finally:
            timer.cancel()
            for task in group.tasks:
                task.cancel()
            del self._groups[request.group_id]
            if not self._groups:
                self._idle.set()

    def cancel(self, group_ids: Collection[str] = ()) -> int:
        """Stops the named groups, or all. Returns the number of stopped rollouts."""
        named = [group for name, group in self._groups.items() if not group_ids or name in group_ids]
        return sum(group.stop("cancelled") for group in named)

    async def drain(self, grace_s: float) -> None:
        """Takes no more groups, gives those that run `grace_s` seconds, then cancels them."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        self.cancel()

    def status(self) -> RolloutStatus:
        now = time.monotonic()
        while self._finished_at and self._finished_at[0] < now - RATE_WINDOW_S:
            self._finished_at.popleft()
        waiting = sum(group.left for group in self._groups.values()) - self._running
        return RolloutStatus(
            running=self._running,
            queued=max(0, waiting),
            finished=self._finished,
            failures=dict(self._failures),
            rollouts_per_s=len(self._finished_at) / RATE_WINDOW_S,
            engines=self._engines.endpoints(),
            draining=self.draining,
        )

    def _admitted(self, request: RolloutRequest) -> tuple[HostedOldEnv, Row]:
        if self.draining:
            raise MeshError(Reason.DRAINING, "this server is draining; send the group to another one")
        env = self.environments.get(request.environment)
        if env is None:
            hosted = ", ".join(sorted(self.environments))
            raise MeshError(
                Reason.UNKNOWN_ENVIRONMENT, f"no environment {request.environment!r} here; hosted are: {hosted}"
            )
        now = time.monotonic()
        self._seen.refuse(request.request_id, now, {group.request.request_id for group in self._groups.values()})
        if request.group_id in self._groups:
            raise MeshError(
                Reason.DUPLICATE_REQUEST, f"group {request.group_id} is running; use a new group_id or wait for its end"
            )
        row = env.row(request)
        self._engines.require(request, env.sampling(request))
        self._seen.admit(request.request_id, now)
        return env, row

    async def _one(self, group: PlayedGroup, env: HostedOldEnv, row: Row, index: int) -> None:
        async with self._places:
            self._running += 1
            try:
                group.events.put_nowait(await env.play(row, group.request, index))
            except Exception as error:  # noqa: BLE001  # whatever an environment raises is its rollout's failure
                group.events.put_nowait(as_mesh_error(error))
            finally:
                self._running -= 1

    async def _whole(self, group: PlayedGroup, env: HostedOldEnv, row: Row) -> None:
        size = group.request.group_size
        async with self._places:  # one place for a group, whose rollouts end together
            self._running += size
            try:
                async for event in env.play_group(row, group.request):
                    group.events.put_nowait(event)
            except Exception as error:  # noqa: BLE001  # a reward that breaks is the failure of all that it compares
                for _ in range(size):
                    group.events.put_nowait(as_mesh_error(error))
            finally:
                self._running -= size

    def _counted(self, group: PlayedGroup, event: Rollout | MeshError) -> Rollout | RolloutFailure:
        if isinstance(event, Rollout):
            group.ended["finished"] += 1
            group.tokens += sum(int(sample.loss_mask.sum()) for sample in event.samples)
            self._finished += 1
            self._finished_at.append(time.monotonic())
            return event
        group.ended["failed"] += 1
        self._failures[event.reason.name] += 1
        return RolloutFailure(
            rollout_id=str(uuid.uuid4()),
            group_id=group.request.group_id,
            reason=event.reason.name,
            message=event.message,
            retryable=event.retryable,
        )
