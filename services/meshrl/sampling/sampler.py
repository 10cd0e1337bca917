"""Samples groups at the rollout services: asks until one admits a group, then gathers what streams back.

Fed with tickets by a training loop or an evaluation, which get a `RolloutGroup` back. A group that loses its service is
completed at another one, or at the same once it is back: what has come back stays, and only the rest is sampled again.
`GroupAttempts` decides where a group is asked for next, after which wait, and when to give up.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from loguru import logger

from meshrl.client.backoff import Backoff
from meshrl.core.clock import Clock
from meshrl.core.waiting import first_of
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.sampling.hosts import GroupPlace, HostState, RolloutHost, describe_hosts
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.retry import AWAY, Patience, failed
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutEvent, RolloutFailure, RolloutRequest, RolloutSummary, Sampling

Problems = Sequence[tuple[str, str]]
"""(field, what it must be) for each rule that a rollout breaks."""

_GROUP_ERRORS = frozenset({Reason.DEADLINE_PASSED, Reason.ENVIRONMENT_FAILED, Reason.ENGINE_FAILED, Reason.INTERNAL})
_GRACE_S = 30.0
LINGER_S = 10.0
"""For so long a group whose stream broke goes on at its service and is attached to again, before others are asked."""
_NAMED_AFTER_S = 10.0
"""A version takes a moment to reach the engines; who refuses a group for longer has something to tell."""


class GroupSampler:
    """Samples groups for training and evaluation alike."""

    def __init__(
        self,
        pool: RolloutPool,
        *,
        deadlines: SamplerDeadlines,
        engine_pool: str = "",
        run_id: str = "",
        routed_experts: bool = False,
        clock: Clock,
    ) -> None:
        """`routed_experts`: rollouts that are trained on are to hold the experts that their tokens went through."""
        self.pool = pool
        self._routed_experts = routed_experts
        self._deadlines = deadlines
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
        """Returns the group once it is over; what was lost on the way counts as failures of the group. With
        `scores_only` nothing trains on it, so its logprobs may be any; with `conversations` its rollouts hold their
        messages. A rollout of which `problems_of` finds some counts as failed. Once `is_wanted` is false, the group is
        not asked for again. Raises RunError when no service is there, or one refuses the group for good."""
        group = RolloutGroup(ticket=ticket)
        attempts = GroupAttempts(self.pool, ticket, self._deadlines, self._clock)
        began_s = self._clock.now()
        with self.pool.sampling(ticket.group_id, ticket.task.environment, ticket.size, ticket.min_version) as place:
            while place.left:
                if not is_wanted():
                    group.cancelled = place.left
                    break
                host = await attempts.next_host(place)
                rest = ticket.moved(place.left, moves=attempts.interrupted)
                request = self._request(rest, sampling, traceparent, scores_only, conversations)
                try:
                    await self._play(host, request, group, problems_of, on_event)
                    if not (group.cancelled and is_wanted() and await self._is_leaving(host)):
                        break
                    group.cancelled = 0
                    gone = MeshError(Reason.DRAINING, f"the rollout service at {host.address} cancelled what it played")
                    attempts.failed_at(host, gone, place)
                except MeshError as error:  # refused, or cut off: what came back stays
                    goes_on = error.reason in AWAY or not (group.rollouts or group.failures)
                    if not goes_on or error.reason in _GROUP_ERRORS:
                        return self._over(group, began_s, error)
                    attempts.failed_at(host, error, place)
        return self._over(group, began_s, None)

    async def _play(
        self,
        host: RolloutHost,
        request: RolloutRequest,
        group: RolloutGroup,
        problems_of: Callable[[Rollout], Problems],
        on_event: Callable[[RolloutEvent], None],
    ) -> None:
        try:
            async with asyncio.timeout(self._deadlines.group_s + _GRACE_S) as limit:
                with self.pool.at(host, request.group_id, limit):
                    await self._gather(host, request, group, problems_of, on_event)
        except TimeoutError:
            if host.state is HostState.AWAY:  # given up by the pool
                raise MeshError(
                    Reason.UNREACHABLE, f"the rollout service at {host.address} is away: {host.why}"
                ) from None
            raise MeshError(Reason.DEADLINE_PASSED, "the group's stream did not end") from None

    async def _is_leaving(self, host: RolloutHost) -> bool:
        await self.pool.look(host)
        return host.state is not HostState.SERVING

    async def sample_whole(
        self,
        ticket: GroupTicket,
        *,
        sampling: Sampling,
        attempts: int,
        traceparent: str = "",
        conversations: bool = False,
    ) -> RolloutGroup:
        """Samples a group for its scores alone; what is lost of it is sampled again, up to `attempts` in all. The group
        holds what came back, and what failed last. Raises RunError as `sample` does."""
        whole = await self.sample(
            ticket, sampling=sampling, scores_only=True, traceparent=traceparent, conversations=conversations
        )
        for attempt in range(1, attempts):
            missing = whole.lost + whole.cancelled + sum(failure.retryable for failure in whole.failures)
            if not missing:
                break
            more = ticket.for_missing(missing, reseeds=attempt if whole.rollouts else 0)
            more = replace(more, group_id=f"eval-{uuid.uuid4()}")
            again = await self.sample(
                more, sampling=sampling, scores_only=True, traceparent=traceparent, conversations=conversations
            )
            whole.rollouts += again.rollouts
            whole.failures = [one for one in whole.failures if not one.retryable] + again.failures
            whole.cancelled, whole.cut_short = again.cancelled, again.cut_short
        return whole

    def _request(
        self, ticket: GroupTicket, sampling: Sampling, traceparent: str, scores_only: bool, conversations: bool
    ) -> RolloutRequest:
        return RolloutRequest(
            request_id=str(uuid.uuid4()),
            group_id=ticket.group_id,
            environment=ticket.task.environment,
            task_index=ticket.task.index,
            group_size=ticket.size,
            sampling=Sampling(seed=ticket.seed).over(sampling),
            engine_pool=self._engine_pool,
            run_id=self._run_id,
            min_version=ticket.min_version,
            deadline_s=self._deadlines.group_s,
            traceparent=traceparent,
            scores_only=scores_only,
            conversations=conversations,
            routed_experts=self._routed_experts and not scores_only,
            linger_s=LINGER_S,
        )

    async def _gather(
        self,
        host: RolloutHost,
        request: RolloutRequest,
        group: RolloutGroup,
        problems_of: Callable[[Rollout], Problems],
        on_event: Callable[[RolloutEvent], None],
    ) -> None:
        async with aclosing(self.pool.client(host).run_rollouts(request)) as events:
            async for received in events:
                event = received
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
                if isinstance(event, RolloutFailure) and event.reason == Reason.BAD_ROLLOUT.name:
                    logger.warning(
                        f"rollout {event.rollout_id!r} of environment {group.ticket.task.environment!r} from the"
                        f" rollout service at {host.address} counts as failed: {event.message}"
                    )
                if isinstance(event, Rollout):
                    group.rollouts.append(event)
                elif isinstance(event, RolloutFailure):
                    group.failures.append(event)
                elif isinstance(event, RolloutSummary):
                    group.cancelled = event.cancelled
                    group.sampled_tokens += event.sampled_tokens
                on_event(event)
                if not isinstance(event, RolloutSummary):
                    left = group.ticket.size - group.episodes - len(group.failures)
                    self.pool.came_back(
                        request.group_id,
                        left=left,
                        failed=isinstance(event, RolloutFailure),
                        tokens=event.sampled_tokens if isinstance(event, Rollout) else 0,
                    )

    def _over(self, group: RolloutGroup, began_s: float, error: MeshError | None) -> RolloutGroup:
        group.seconds = self._clock.now() - began_s
        if error is not None:
            group.cut_short = error.reason.name
            logger.warning(f"group {group.ticket.group_id} was cut short: {error}")
        return group


def _mistaken(rollout: Rollout, group: RolloutGroup) -> Problems:
    ticket, found = group.ticket, []
    if not rollout.rollout_id or any(rollout.rollout_id == other.rollout_id for other in group.rollouts):
        found.append(("rollout_id", f"must be a UUID of its own, got {rollout.rollout_id!r}"))
    if rollout.group_id != ticket.group_id:
        found.append(("group_id", f"must be {ticket.group_id!r}, got {rollout.group_id!r}"))
    if rollout.environment != ticket.task.environment:
        found.append(("environment", f"must be {ticket.task.environment!r}, got {rollout.environment!r}"))
    return found


_GONE = frozenset({Reason.UNREACHABLE, Reason.DRAINING})
_MAY_PASS = frozenset({Reason.CANCELLED, Reason.DUPLICATE_REQUEST})
"""gRPC's server cancels a call that its application has not taken up in time: the service is busy, not away. And a
service that has not noticed yet that its stream broke says that the group is running."""


@dataclass(frozen=True, kw_only=True)
class SamplerDeadlines:
    """How long the rollout services have, in seconds. `group_s` for one group, `retry_s` to accept a group that they
    refuse, `unreachable_s` to come back when they are away."""

    group_s: float
    retry_s: float
    unreachable_s: float


class GroupAttempts:
    """The calls for one group. A service that refuses it is passed over for a while, and another one asked at once.
    `interrupted` counts the calls that brought a part of the group and broke off."""

    def __init__(self, pool: RolloutPool, ticket: GroupTicket, deadlines: SamplerDeadlines, clock: Clock) -> None:
        self.interrupted = 0
        self._pool = pool
        self._ticket = ticket
        self._deadlines = deadlines
        self._clock = clock
        self._avoid_until_s: dict[str, float] = {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._patience = Patience(
            unreachable_s=self._deadlines.unreachable_s, retry_s=self._deadlines.retry_s, also=_MAY_PASS
        )
        self._refused_since_s = 0.0
        self._while_away = Backoff(0.05, 2.0)
        self._away_s = 0.0

    async def next_host(self, place: GroupPlace) -> RolloutHost:
        """Returns once there is a service to ask: the best that takes groups, or one that may be back by now."""
        environment = self._ticket.task.environment
        while True:
            now_s = self._clock.now()
            avoid = {address for address, until_s in self._avoid_until_s.items() if until_s > now_s}
            host = self._pool.table.choose(
                environment, place.left, now_s, avoid=avoid, min_version=self._ticket.min_version
            )
            if host is not None:
                return host
            serving = [one for one in self._pool.table.hosting(environment) if one.state is HostState.SERVING]
            if not serving:
                if await self._changes_within(self._away_s):
                    continue
                return self._pool.table.next_in_turn(environment)
            until_s = min(max(one.refuses_until_s, self._avoid_until_s.get(one.address, 0.0)) for one in serving)
            await self._changes_within(max(0.01, until_s - now_s))

    async def _changes_within(self, wait_s: float) -> bool:
        """Waits until a service comes or goes; False when none does for `wait_s`."""
        change = self._pool.changed.upcoming

        async def pause() -> None:
            await self._clock.sleep(wait_s)

        await first_of(change.wait(), pause())
        return change.is_set()

    def failed_at(self, host: RolloutHost, error: MeshError, place: GroupPlace) -> None:
        """A call was refused, or broke off. Raises RunError when nobody will take the group."""
        if place.has_begun:
            self.interrupted += 1
            self._begin_anew()
            logger.warning(
                f"group {self._ticket.group_id} lost the rollout service at {host.address} with {place.left} of"
                f" {self._ticket.size} rollouts to come, which are sampled again: {error}"
            )
        place.waits_for = f"{host.address} refuses it with {error}"
        doing = f"running group {self._ticket.group_id} of {self._ticket.task.environment!r}"
        if error.reason in _GONE:
            self._pool.refused(host, error, 0.0)
            self._away_s = self._while_away.next_s()
            if self._pool.given_up(self._ticket.task.environment):
                hosts = self._pool.table.hosting(self._ticket.task.environment)
                name = "rollout service" if len(hosts) == 1 else "rollout services"
                raise failed(name, describe_hosts(hosts), doing, error) from error
            return
        wait_s = self._patience.wait_s(error, self._clock.now())
        if wait_s is None:
            raise failed("rollout service", host.address, doing, error) from error
        now_s = self._clock.now()
        self._avoid_until_s[host.address] = now_s + wait_s
        self._pool.refused(host, error, wait_s)
        self._refused_since_s = self._refused_since_s or now_s
        if now_s - self._refused_since_s >= _NAMED_AFTER_S and error.reason is not Reason.OVERLOADED:
            self._pool.log_refusal(host, error)
        logger.debug(f"group {self._ticket.group_id} refused at {host.address}, not again for {wait_s:.2f} s: {error}")
