"""Samples groups at the rollout service: asks until a group is admitted, then gathers what streams back.

Fed with tickets by a training loop or an evaluation, which get a `RolloutGroup` back.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from loguru import logger

from meshrl.client import RolloutClient
from meshrl.core.clock import Clock
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.sampling.retry import Patience, failed
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutEvent, RolloutFailure, RolloutRequest, RolloutSummary, Sampling

Problems = Sequence[tuple[str, str]]
"""(field, what it must be) for each rule that a rollout breaks."""

_GROUP_ERRORS = frozenset({Reason.DEADLINE_PASSED, Reason.ENVIRONMENT_FAILED, Reason.ENGINE_FAILED, Reason.INTERNAL})
_NOT_TAKEN_UP = frozenset({Reason.CANCELLED})
"""gRPC's server cancels a call that its application has not taken up in time: the service is busy, not away."""
_GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class SamplerDeadlines:
    """How long the rollout service has, in seconds.

    `group_s` for one group, `retry_s` to accept a group that it refuses, `unreachable_s` to come back when it is away.
    """

    group_s: float
    retry_s: float
    unreachable_s: float


class GroupSampler:
    """Samples groups for training and evaluation alike."""

    def __init__(
        self,
        client: RolloutClient,
        *,
        address: str,
        deadlines: SamplerDeadlines,
        engine_pool: str = "",
        clock: Clock,
    ) -> None:
        self._client = client
        self._address = address
        self._deadlines = deadlines
        self._engine_pool = engine_pool
        self._clock = clock

    async def sample(
        self,
        ticket: GroupTicket,
        *,
        sampling: Sampling,
        traceparent: str = "",
        scores_only: bool = False,
        problems_of: Callable[[Rollout], Problems] = lambda rollout: (),
        on_event: Callable[[RolloutEvent], None] = lambda event: None,
    ) -> RolloutGroup:
        """Returns the group once it is over; what was lost on the way counts as failures of the group.

        With `scores_only` nothing trains on it, so its logprobs may be any. A rollout of which `problems_of` finds some
        counts as failed.

        Raises RunError when the service is gone, or refuses the group for good.
        """
        patience = Patience(
            unreachable_s=self._deadlines.unreachable_s, retry_s=self._deadlines.retry_s, also=_NOT_TAKEN_UP
        )
        group = RolloutGroup(ticket=ticket)
        began_s = self._clock.now()
        while True:
            request = self._request(ticket, sampling, traceparent, scores_only)
            try:
                async with asyncio.timeout(self._deadlines.group_s + _GRACE_S):
                    await self._gather(request, group, problems_of, on_event)
            except MeshError as error:  # refused, or cut off: what came back stays
                if group.rollouts or group.failures or error.reason in _GROUP_ERRORS:
                    return self._over(group, began_s, error)
                wait_s = patience.wait_s(error, self._clock.now())
                if wait_s is None:
                    doing = f"running group {ticket.group_id} of {ticket.task.environment!r}"
                    raise failed("rollout service", self._address, doing, error) from error
                logger.debug(f"group {ticket.group_id} refused, again in {wait_s:.2f} s: {error}")
                await self._clock.sleep(wait_s)
            except TimeoutError:  # the server kept neither its deadline nor the call's
                return self._over(group, began_s, MeshError(Reason.DEADLINE_PASSED, "the group's stream did not end"))
            else:
                return self._over(group, began_s, None)

    async def sample_whole(self, ticket: GroupTicket, *, sampling: Sampling, attempts: int) -> RolloutGroup:
        """Samples a group for its scores alone; what is lost of it is sampled again, up to `attempts` in all.

        The group holds what came back, and what failed last. Raises RunError as `sample` does.
        """
        whole = await self.sample(ticket, sampling=sampling, scores_only=True)
        for attempt in range(1, attempts):
            missing = whole.lost + whole.cancelled + sum(failure.retryable for failure in whole.failures)
            if not missing:
                break
            more = ticket.for_missing(missing, reseeds=attempt if whole.rollouts else 0)
            more = replace(more, group_id=f"eval-{uuid.uuid4()}")
            again = await self.sample(more, sampling=sampling, scores_only=True)
            whole.rollouts += again.rollouts
            whole.failures = [one for one in whole.failures if not one.retryable] + again.failures
            whole.cancelled, whole.cut_short = again.cancelled, again.cut_short
        return whole

    def _request(self, ticket: GroupTicket, sampling: Sampling, traceparent: str, scores_only: bool) -> RolloutRequest:
        return RolloutRequest(
            request_id=str(uuid.uuid4()),
            group_id=ticket.group_id,
            environment=ticket.task.environment,
            task_index=ticket.task.index,
            group_size=ticket.size,
            sampling=Sampling(seed=ticket.seed).over(sampling),
            engine_pool=self._engine_pool,
            min_version=ticket.min_version,
            deadline_s=self._deadlines.group_s,
            traceparent=traceparent,
            scores_only=scores_only,
        )

    async def _gather(
        self,
        request: RolloutRequest,
        group: RolloutGroup,
        problems_of: Callable[[Rollout], Problems],
        on_event: Callable[[RolloutEvent], None],
    ) -> None:
        async with aclosing(self._client.run_rollouts(request)) as events:
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
                    )
                if isinstance(event, RolloutFailure) and event.reason == Reason.BAD_ROLLOUT.name:
                    logger.warning(
                        f"rollout {event.rollout_id!r} of environment {group.ticket.task.environment!r} from the"
                        f" rollout service at {self._address} counts as failed: {event.message}"
                    )
                if isinstance(event, Rollout):
                    group.rollouts.append(event)
                elif isinstance(event, RolloutFailure):
                    group.failures.append(event)
                elif isinstance(event, RolloutSummary):
                    group.cancelled = event.cancelled
                    group.sampled_tokens = event.sampled_tokens
                on_event(event)

    def _over(self, group: RolloutGroup, began_s: float, error: MeshError | None) -> RolloutGroup:
        group.seconds = self._clock.now() - began_s
        if error is not None:
            group.cut_short = error.reason.name
            logger.warning(f"group {group.ticket.group_id} was cut short: {error}")
        return group


def _mistaken(rollout: Rollout, group: RolloutGroup) -> Problems:
    """What is wrong with who a rollout says it is."""
    ticket, found = group.ticket, []
    if not rollout.rollout_id or any(rollout.rollout_id == other.rollout_id for other in group.rollouts):
        found.append(("rollout_id", f"must be a UUID of its own, got {rollout.rollout_id!r}"))
    if rollout.group_id != ticket.group_id:
        found.append(("group_id", f"must be {ticket.group_id!r}, got {rollout.group_id!r}"))
    if rollout.environment != ticket.task.environment:
        found.append(("environment", f"must be {ticket.task.environment!r}, got {rollout.environment!r}"))
    return found
