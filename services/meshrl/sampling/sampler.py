"""Samples groups at the rollout services: asks until one admits a group, then gathers what streams back.

A group that loses its service is completed at another one, or at the same once it is back; only missing rollouts are
sampled again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from loguru import logger

from meshrl.core.clock import Clock
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.sampling.hosts import GroupPlace, HostState, RolloutHost
from meshrl.sampling.pool import GROUP_ERRORS, RolloutPool
from meshrl.sampling.retry import AWAY
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutEvent, RolloutFailure, RolloutRequest, RolloutSummary, Sampling

Problems = Sequence[tuple[str, str]]
"""(field, what it must be) for each rule that a rollout breaks."""

_GRACE_S = 30.0
LINGER_S = 10.0
"""For so long a group whose stream broke goes on at its service and may be attached to again."""


class RolloutSampler:
    def __init__(
        self,
        pool: RolloutPool,
        *,
        group_s: float,
        retry_s: float,
        engine_pool: str = "",
        run_id: str = "",
        routed_experts: bool = False,
        clock: Clock,
    ) -> None:
        """Services have `group_s` seconds for a group, and `retry_s` to accept it. `routed_experts`: rollouts that are
        trained on are to hold the experts that their tokens went through."""
        self.pool = pool
        self._routed_experts = routed_experts
        self._group_s, self._retry_s = group_s, retry_s
        self._engine_pool, self._run_id = engine_pool, run_id
        self._clock = clock

    async def sample(
        self,
        ticket: GroupTicket,
        *,
        sampling: Sampling,
        traceparent: str = "",
        scores_only: bool = False,
        conversations: bool = False,
        problems_of: Callable[[Rollout], Problems] = lambda rollout: (),
        on_event: Callable[[RolloutEvent], None] = lambda event: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> RolloutGroup:
        """Losses count as failures. With `scores_only` nothing trains on the group, so its logprobs may be any; with
        `conversations` its rollouts hold their messages. A rollout of which `problems_of` finds some counts as failed.
        Once `is_wanted` is false, the group is not asked for again. Raises RunError when no service is there, or one
        refuses the group for good."""
        group = RolloutGroup(ticket=ticket)
        began_s = self._clock.now()
        with self.pool.sampling(ticket, self._retry_s) as place:
            while place.left:
                if not is_wanted():
                    group.cancelled = place.left
                    break
                host = await self.pool.next_host(place)
                rest = ticket.for_missing(place.left, moves=place.interrupted)
                request = RolloutRequest(
                    request_id=str(uuid.uuid4()),
                    group_id=rest.group_id,
                    environment=rest.task.environment,
                    task_index=rest.task.index,
                    group_size=rest.size,
                    sampling=Sampling(seed=rest.seed).over(sampling),
                    engine_pool=self._engine_pool,
                    run_id=self._run_id,
                    min_version=rest.min_version,
                    deadline_s=self._group_s,
                    traceparent=traceparent,
                    scores_only=scores_only,
                    conversations=conversations,
                    routed_experts=self._routed_experts and not scores_only,
                    linger_s=LINGER_S,
                )
                try:
                    await self._play(place, host, request, group, problems_of, on_event)
                    if not (group.cancelled and is_wanted()):
                        break
                    await self.pool.look(host)
                    if host.state is HostState.SERVING:
                        break
                    group.cancelled = 0
                    gone = f"the rollout service at {host.address} cancelled what it played"
                    self.pool.failed_at(place, host, MeshError(Reason.DRAINING, gone))
                except MeshError as error:  # refused, or cut off: what came back stays
                    goes_on = error.reason in AWAY or not (group.rollouts or group.failures)
                    if not goes_on or error.reason in GROUP_ERRORS:
                        group.cut_short = error.reason.name
                        logger.warning(f"group {ticket.group_id} was cut short: {error}")
                        break
                    self.pool.failed_at(place, host, error)
        group.seconds = self._clock.now() - began_s
        return group

    async def _play(
        self,
        place: GroupPlace,
        host: RolloutHost,
        request: RolloutRequest,
        group: RolloutGroup,
        problems_of: Callable[[Rollout], Problems],
        on_event: Callable[[RolloutEvent], None],
    ) -> None:
        """Raises MeshError where it is refused or cut off, or its host is given up."""
        try:
            async with asyncio.timeout(self._group_s + _GRACE_S) as limit:
                with self.pool.at(place, host, limit):
                    async with aclosing(self.pool.client(host).run_rollouts(request)) as events:
                        async for event in events:
                            self._take(place, host, group, event, problems_of, on_event)
        except TimeoutError:
            if host.state is HostState.AWAY:  # given up by the pool
                raise MeshError(
                    Reason.UNREACHABLE, f"the rollout service at {host.address} is away: {host.why}"
                ) from None
            raise MeshError(Reason.DEADLINE_PASSED, "the group's stream did not end") from None

    def _take(
        self,
        place: GroupPlace,
        host: RolloutHost,
        group: RolloutGroup,
        event: RolloutEvent,
        problems_of: Callable[[Rollout], Problems],
        on_event: Callable[[RolloutEvent], None],
    ) -> None:
        if isinstance(event, RolloutSummary):
            group.cancelled = event.cancelled
            group.sampled_tokens += event.sampled_tokens
            on_event(event)
            return
        if isinstance(event, Rollout) and (problems := (*_mistaken(event, group), *problems_of(event))):
            has_id = all(field != "rollout_id" for field, _ in problems)  # else it is that of another rollout
            event = RolloutFailure(
                rollout_id=event.rollout_id if has_id else "",
                group_id=event.group_id,
                reason=Reason.BAD_ROLLOUT.name,
                message="; ".join(f"{field} {problem}" for field, problem in problems),
                retryable=False,
                traceparent=event.traceparent,
            )
        if isinstance(event, Rollout):
            group.rollouts.append(event)
        else:
            group.failures.append(event)
            if event.reason == Reason.BAD_ROLLOUT.name:
                logger.warning(
                    f"rollout {event.rollout_id!r} of environment {group.ticket.task.environment!r} from the"
                    f" rollout service at {host.address} counts as failed: {event.message}"
                )
        on_event(event)
        self.pool.came_back(
            place,
            left=group.ticket.size - group.episodes - len(group.failures),
            failed=isinstance(event, RolloutFailure),
            tokens=event.sampled_tokens if isinstance(event, Rollout) else 0,
        )

    async def sample_whole(
        self,
        ticket: GroupTicket,
        *,
        sampling: Sampling,
        attempts: int,
        traceparent: str = "",
        conversations: bool = False,
    ) -> RolloutGroup:
        """Samples a group for its scores alone; what is lost is sampled again, up to `attempts` in all. The group holds
        what came back, and what failed last. Raises RunError as `sample`."""
        sample = partial(
            self.sample, sampling=sampling, scores_only=True, traceparent=traceparent, conversations=conversations
        )
        whole = await sample(ticket)
        for attempt in range(1, attempts):
            missing = whole.lost + whole.cancelled + sum(failure.retryable for failure in whole.failures)
            if not missing:
                break
            more = ticket.for_missing(missing, reseeds=attempt if whole.rollouts else 0)
            again = await sample(replace(more, group_id=f"eval-{uuid.uuid4()}"))
            whole.rollouts += again.rollouts
            whole.failures = [one for one in whole.failures if not one.retryable] + again.failures
            whole.cancelled, whole.cut_short = again.cancelled, again.cut_short
        return whole


def _mistaken(rollout: Rollout, group: RolloutGroup) -> Problems:
    ticket, found = group.ticket, []
    if not rollout.rollout_id or any(rollout.rollout_id == other.rollout_id for other in group.rollouts):
        found.append(("rollout_id", f"must be a UUID of its own, got {rollout.rollout_id!r}"))
    if rollout.group_id != ticket.group_id:
        found.append(("group_id", f"must be {ticket.group_id!r}, got {rollout.group_id!r}"))
    if rollout.environment != ticket.task.environment:
        found.append(("environment", f"must be {ticket.task.environment!r}, got {rollout.environment!r}"))
    return found
