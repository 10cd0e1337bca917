"""Where a group is asked for next, after which wait, and when that is given up; asked by the sampler, call by call."""

from __future__ import annotations

from dataclasses import dataclass

from loguru import logger

from meshrl.client.backoff import Backoff
from meshrl.core.clock import Clock
from meshrl.sampling.groups import GroupTicket
from meshrl.sampling.hosts import GroupPlace, HostState, RolloutHost, describe_hosts
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.retry import Patience, failed
from meshrl.wire.errors import MeshError, Reason

_GONE = frozenset({Reason.UNREACHABLE, Reason.DRAINING})
_MAY_PASS = frozenset({Reason.CANCELLED, Reason.DUPLICATE_REQUEST})
"""gRPC's server cancels a call that its application has not taken up in time: the service is busy, not away. And a
service that has not noticed yet that its stream broke says that the group is running."""


@dataclass(frozen=True, kw_only=True)
class SamplerDeadlines:
    """How long the rollout services have, in seconds.

    `group_s` for one group, `retry_s` to accept a group that they refuse, `unreachable_s` to come back when they are
    away.
    """

    group_s: float
    retry_s: float
    unreachable_s: float


class GroupAttempts:
    """The calls for one group. A service that refuses it is passed over for a while, and another one asked at once.

    `interrupted` counts the calls that brought a part of the group and broke off.
    """

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
                await self._clock.sleep(self._away_s)
                return self._pool.table.next_in_turn(environment)
            until_s = min(max(one.refuses_until_s, self._avoid_until_s.get(one.address, 0.0)) for one in serving)
            await self._clock.sleep(max(0.01, until_s - now_s))

    def failed_at(self, host: RolloutHost, error: MeshError, place: GroupPlace) -> None:
        """A call was refused, or broke off. Raises RunError when nobody will take the group."""
        if place.has_begun:
            self.interrupted += 1
            self._begin_anew()
            logger.warning(
                f"group {self._ticket.group_id} lost the rollout service at {host.address} with {place.left} of"
                f" {self._ticket.size} rollouts to come, which are sampled again: {error}"
            )
        place.waits_for = f"{host.address} says {error.reason.name}"
        doing = f"running group {self._ticket.group_id} of {self._ticket.task.environment!r}"
        if error.reason in _GONE:
            self._pool.refused(host, error, 0.0)
            self._away_s = self._while_away.next_s()
            self._avoid_until_s[host.address] = self._clock.now() + self._away_s
            if self._pool.given_up(self._ticket.task.environment):
                hosts = self._pool.table.hosting(self._ticket.task.environment)
                name = "rollout service" if len(hosts) == 1 else "rollout services"
                raise failed(name, describe_hosts(hosts), doing, error) from error
            return
        wait_s = self._patience.wait_s(error, self._clock.now())
        if wait_s is None:
            raise failed("rollout service", host.address, doing, error) from error
        self._avoid_until_s[host.address] = self._clock.now() + wait_s
        self._pool.refused(host, error, wait_s)
        logger.debug(f"group {self._ticket.group_id} refused at {host.address}, not again for {wait_s:.2f} s: {error}")
