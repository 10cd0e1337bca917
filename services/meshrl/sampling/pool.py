"""The rollout services that a run's groups are played at: one client each, their health, and where each group is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol

from loguru import logger

from meshrl.client import ChannelOptions, RolloutClient
from meshrl.core.clock import Clock
from meshrl.core.waiting import Pulse, beside, first_of, set_within
from meshrl.sampling.groups import GroupTicket
from meshrl.sampling.hosts import GroupPlace, HostState, HostTable, RolloutHost, differing
from meshrl.sampling.retry import RunError, failed, say_waiting
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, RolloutEvent, RolloutRequest, RolloutStatus

WATCH_S = 1.0
"""Between two looks at a service."""

AWAY_WATCH_S = 0.2
"""The same for one that is away: groups may wait for it."""

LOOK_DEADLINE_S = 5.0
"""For a service to answer a look."""

START_GRACE_S = 10.0
"""At the start, how long others are waited for once every environment is hosted."""

NAMED_AFTER_S = 10.0
"""A version takes a moment to reach the engines; a longer refusal is logged."""

GROUP_ERRORS = frozenset({Reason.DEADLINE_PASSED, Reason.ENVIRONMENT_FAILED, Reason.ENGINE_FAILED, Reason.INTERNAL})
"""A group that ends so is not played elsewhere."""

_GONE = frozenset({Reason.UNREACHABLE, Reason.DRAINING})
_NUMBER = re.compile(r"\d+")


class RolloutServiceClient(Protocol):
    """A `RolloutClient`, or a worker that has dialled in, with the same errors."""

    address: str

    async def wait_until_serving(
        self, deadline_s: float, on_wait: Callable[[str], None] = lambda why: None
    ) -> None: ...

    async def why_not_serving(self, deadline_s: float) -> str: ...

    async def list_environments(self, deadline_s: float | None = None) -> tuple[EnvironmentInfo, ...]: ...

    async def get_status(self, deadline_s: float | None = None) -> RolloutStatus: ...

    def run_rollouts(self, request: RolloutRequest) -> AsyncGenerator[RolloutEvent, None]: ...

    async def cancel_rollouts(self, group_ids: Sequence[str] = ()) -> int: ...

    async def close(self) -> None: ...


class RolloutPool:
    """The services at these addresses, and workers that `join`. `unreachable_s`: how long one of the former may be away
    before it is given up. `dial_in`: where workers dial in, and the names of those that a run waits for."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        unreachable_s: float,
        options: ChannelOptions | None = None,
        clock: Clock | None = None,
        dial_in: tuple[str, Collection[str]] | None = None,
    ) -> None:
        self.table = HostTable(addresses)
        self.places: dict[str, GroupPlace] = {}
        """Groups that are sampled now, by group_id."""
        self.changed = Pulse()
        """Beats when a service comes or goes."""
        self._clients: dict[str, RolloutServiceClient] = {
            address: RolloutClient(address, options) for address in addresses
        }
        self._dial_in = dial_in
        self._joined: dict[str, asyncio.Task[None]] = {}
        self._unreachable_s = unreachable_s
        self._clock = Clock() if clock is None else clock
        self._has_no_status: set[str] = set()

    @property
    def slots(self) -> int | None:
        """Rollouts that the serving services run at once; None if one does not report them."""
        said = [host.slots for host in self.table.hosts if host.state is HostState.SERVING]
        known = [slots for slots in said if slots is not None]
        return sum(known) if said and len(known) == len(said) else None

    def client(self, host: RolloutHost) -> RolloutServiceClient:
        return self._clients[host.address]

    def environments(self) -> Mapping[str, EnvironmentInfo]:
        return {name: info for host in reversed(self.table.hosts) for name, info in host.environments.items()}

    async def close(self) -> None:
        for watcher in self._joined.values():
            watcher.cancel()
        await asyncio.gather(*self._joined.values(), return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    # --- the start --------------------------------------------------------------------------------

    async def gather(self, wanted: Collection[str], *, startup_s: float) -> None:
        """Returns once all serve, or START_GRACE_S after the present ones host everything `wanted`; with workers that
        dial in, once the required ones have. Raises RunError when something has no host within `startup_s`."""
        meeting = [asyncio.create_task(self._meet(host, startup_s)) for host in self.table.hosts]
        for task in meeting:
            task.add_done_callback(lambda _: self.changed.beat())
        end_s = self._clock.now() + startup_s + LOOK_DEADLINE_S
        try:
            while True:
                upcoming, missing = self.changed.upcoming, self.not_dialled_in(wanted)
                met = [task.result() for task in meeting if task.done()]
                if len(met) == len(meeting) and not missing:
                    break
                hosted = self.environments().keys()
                if hosted and hosted >= set(wanted) and not missing:
                    end_s = min(end_s, self._clock.now() + START_GRACE_S)
                if not await set_within(upcoming, max(0.0, end_s - self._clock.now())):
                    break
        finally:
            for task in meeting:
                task.cancel()
        if missing := self.not_dialled_in(wanted):
            assert self._dial_in is not None
            came = "; ".join(f"{host.address} hosts {', '.join(host.environments)}" for host in self.table.hosts)
            raise RunError(
                f"{' and '.join(missing)} did not dial in at {self._dial_in[0]} within {startup_s:g} s (there is:"
                f" {came or 'nobody'}); start `rollout --exchange.address HOST:PORT` there, or raise"
                " deadlines.startup_s"
            )
        absent = [host for host in self.table.hosts if host.state is not HostState.SERVING]
        if absent and (len(absent) == len(self.table.hosts) or not self.environments().keys() >= set(wanted)):
            error = MeshError(Reason.UNREACHABLE, absent[0].why)
            raise failed("rollout service", absent[0].address, "starting", error)
        if problems := differing(self.table.hosts):
            raise RunError("; ".join(problems))
        for host in absent:
            logger.warning(
                f"the run begins without the rollout service at {host.address}, used once it serves: {host.why}"
            )

    def not_serving(self) -> list[str]:
        return [host.address for host in self.table.hosts if host.state is not HostState.SERVING]

    def not_dialled_in(self, wanted: Collection[str]) -> list[str]:
        if self._dial_in is None:
            return []
        there = {host.address for host in self.table.hosts if host.state is HostState.SERVING}
        workers = [f"worker {name!r}" for name in self._dial_in[1] if f"exchange/{name}" not in there]
        hosted = self.environments().keys()
        return workers + [f"somebody who hosts {name!r}" for name in sorted(set(wanted) - hosted)]

    def join(self, client: RolloutServiceClient, *, patience_s: float, is_new_process: bool) -> None:
        """A worker has dialled in, perhaps again; it is watched until the pool is closed. `patience_s`: how long a run
        waits for it if no other host has its environments."""
        host = next((one for one in self.table.hosts if one.address == client.address), None)
        if host is None:
            host = RolloutHost(address=client.address, since_s=self._clock.now(), patience_s=patience_s)
            self.table.hosts.append(host)
            self._clients[client.address] = client
        elif is_new_process:
            self._turn(host, HostState.AWAY, "another process has taken its place")
        elif client.address in self._joined:
            return
        if (watcher := self._joined.pop(client.address, None)) is not None:
            watcher.cancel()
        self._joined[client.address] = asyncio.create_task(self._watch(host))  # looks at it at once

    async def _meet(self, host: RolloutHost, deadline_s: float) -> None:
        client, began_s = self.client(host), self._clock.now()
        host.since_s = began_s
        try:
            await client.wait_until_serving(deadline_s, say_waiting("rollout service", host.address, deadline_s))
        except MeshError as error:
            if error.reason is Reason.UNREACHABLE:
                host.why = error.message
                return
            raise failed("rollout service", host.address, "starting", error) from error
        try:
            infos = await client.list_environments()
        except MeshError as error:
            raise failed("rollout service", host.address, "listing environments", error) from error
        host.environments = {info.name: info for info in infos}
        host.turn(HostState.SERVING, self._clock.now())

    # --- watching -----------------------------------------------------------------------------------

    def watching(self) -> AbstractAsyncContextManager[None]:
        """A loss moves its groups, a return is used."""
        return beside(*(self._watch(host) for host in self.table.hosts))

    async def _watch(self, host: RolloutHost) -> None:
        while True:
            try:
                await self.look(host)
                self._give_up_groups(host)
            except Exception:  # noqa: BLE001  # a defect in looking must not leave a service unwatched
                logger.exception(f"looking at the rollout service at {host.address} failed")
            await self._clock.sleep(WATCH_S if host.state is HostState.SERVING else AWAY_WATCH_S)

    async def look(self, host: RolloutHost) -> None:
        """After an absence it asks for the environments, too."""
        try:
            state, why = await self._seen(host)
        except MeshError as error:
            state, why = HostState.AWAY, str(error)
        self._turn(host, state, why)

    async def _seen(self, host: RolloutHost) -> tuple[HostState, str]:
        client = self.client(host)
        why = await client.why_not_serving(LOOK_DEADLINE_S)
        if not why and host.state is not HostState.SERVING:
            infos = await client.list_environments(LOOK_DEADLINE_S)
            fresh = RolloutHost(address=host.address, environments={info.name: info for info in infos})
            others = [other for other in self.table.hosts if other is not host]
            if differs := "; ".join(differing([*others, fresh])):
                if host.why != differs:
                    logger.warning(f"the rollout service at {host.address} is not used: {differs}")
                return HostState.AWAY, differs
            # What nobody else hosts stays, should it be gone here: the group that is refused says so.
            orphans = {name: info for name, info in host.environments.items() if self.table.hosting(name) == [host]}
            host.environments = {**orphans, **fresh.environments}
        if await self._drains(host):
            return HostState.DRAINING, why or "it is draining"
        return (HostState.AWAY, why) if why else (HostState.SERVING, "")

    async def _drains(self, host: RolloutHost) -> bool:
        if host.address in self._has_no_status:
            return False
        try:
            status = await self.client(host).get_status(LOOK_DEADLINE_S)
        except MeshError as error:
            if error.reason is not Reason.NOT_SUPPORTED:
                raise
            self._has_no_status.add(host.address)  # it is weighed by what comes back alone
            return False
        versions = [one.version for one in status.engines if one.healthy and one.version is not None]
        host.version, host.needed = max(versions, default=None), self._newest_needed or 0
        ours = sum(place.left for place in host.groups.values())
        host.slots = status.max_concurrent or None
        host.others = max(0, status.running + status.queued - ours)
        return status.draining

    def _turn(self, host: RolloutHost, state: HostState, why: str) -> None:
        now_s, before, since_s = self._clock.now(), host.state, host.since_s
        if not host.turn(state, now_s, why):
            return
        self.changed.beat()
        if state is HostState.SERVING:
            host.refuses_until_s = 0.0
            for record in host.achieved.values():
                record.count(now_s)
                if record.finished == 0.0:  # its groups stood still, which says nothing about its pace
                    record.busy_s = 0.0
            logger.info(f"the rollout service at {host.address} serves again, after {now_s - since_s:.0f} s")
        elif before is HostState.SERVING:
            host.achieved.clear()  # who comes back is another process, as a rule, and slow at other things
            for place in host.groups.values():  # whose rollouts may come over another connection
                host.achievement(place.environment).count(now_s, begun=place.left)
            alone = sorted(name for name in host.environments if not self.table.replaceable(host, name))
            patience_s = self._unreachable_s if host.patience_s is None else host.patience_s
            rest = f"; nobody else serves {', '.join(alone)}: waiting for up to {patience_s:g} s" if alone else ""
            logger.warning(f"the rollout service at {host.address} is {state.value}: {why}{rest}")

    def _give_up_groups(self, host: RolloutHost) -> None:
        if host.state is not HostState.AWAY or self._clock.now() - host.since_s < self._unreachable_s:
            return
        if host.patience_s is not None:  # its lease says when
            return
        for place in host.groups.values():
            stands = place.limit is not None and not place.limit.expired()
            if place.limit is not None and stands and self.table.replaceable(host, place.environment):
                place.limit.reschedule(asyncio.get_running_loop().time())

    # --- groups -------------------------------------------------------------------------------------

    @contextmanager
    def sampling(self, ticket: GroupTicket, retry_s: float) -> Iterator[GroupPlace]:
        """Services that refuse the group are asked again for `retry_s`."""
        place = self.places[ticket.group_id] = GroupPlace(
            environment=ticket.task.environment,
            left=ticket.size,
            since_s=self._clock.now(),
            group_id=ticket.group_id,
            min_version=ticket.min_version,
            retry_s=retry_s,
        )
        try:
            yield place
        finally:
            del self.places[ticket.group_id]

    async def next_host(self, place: GroupPlace) -> RolloutHost:
        """The best that takes groups, or one that may be back."""
        while True:
            now_s = self._clock.now()
            avoid = {address for address, until_s in place.avoids_until_s.items() if until_s > now_s}
            host = self.table.choose(place.environment, place.left, now_s, avoid=avoid, min_version=place.min_version)
            if host is not None:
                return host
            serving = [one for one in self.table.hosting(place.environment) if one.state is HostState.SERVING]
            if serving:
                until_s = min(max(one.refuses_until_s, place.avoids_until_s.get(one.address, 0.0)) for one in serving)
                await self._changes_within(max(0.01, until_s - now_s))
            elif not await self._changes_within(place.away_s):
                return self.table.next_in_turn(place.environment)

    async def _changes_within(self, wait_s: float) -> bool:
        change = self.changed.upcoming

        async def pause() -> None:
            await self._clock.sleep(wait_s)

        await first_of(change.wait(), pause())
        return change.is_set()

    def failed_at(self, place: GroupPlace, host: RolloutHost, error: MeshError) -> None:
        """The service is passed over for a while. Raises RunError when none will take the group."""
        now_s = self._clock.now()
        if place.has_begun:
            place.interrupted += 1
            place.begin_anew()
            logger.warning(
                f"group {place.group_id} lost the rollout service at {host.address} with {place.left} of"
                f" {place.size} rollouts to come, which are sampled again: {error}"
            )
        place.waits_for = f"{host.address} refuses it with {error}"
        doing = f"running group {place.group_id} of {place.environment!r}"
        if error.reason in _GONE:
            if error.reason is Reason.DRAINING or host.state is not HostState.AWAY:  # else it is known why
                state = HostState.DRAINING if error.reason is Reason.DRAINING else HostState.AWAY
                self._turn(host, state, str(error))
            place.away_s = place.while_away.next_s()
            if self.table.all_away(place.environment, now_s, self._unreachable_s):
                hosts = self.table.hosting(place.environment)
                name = "rollout service" if len(hosts) == 1 else "rollout services"
                doing += f", and stayed away for {self._unreachable_s:g} s (deadlines.unreachable_s)"
                raise failed(name, " and ".join(one.address for one in hosts), doing, error) from error
            return
        wait_s = place.patience.wait_s(error, now_s)
        if wait_s is None:
            raise failed("rollout service", host.address, doing, error) from error
        place.avoids_until_s[host.address] = now_s + wait_s
        refused_s = now_s - (place.patience.first_s or now_s)
        if error.reason is Reason.OVERLOADED:  # which holds for other groups as well
            host.refuses_until_s = now_s + wait_s
        elif refused_s >= NAMED_AFTER_S and host.refusal != (kind := _NUMBER.sub("", str(error))):
            host.refusal = kind  # named once, whatever versions and ports the message has
            logger.warning(f"the rollout service at {host.address} takes no groups: {error}")
        logger.debug(f"group {place.group_id} refused at {host.address}, not again for {wait_s:.2f} s: {error}")

    @contextmanager
    def at(self, place: GroupPlace, host: RolloutHost, limit: asyncio.Timeout) -> Iterator[None]:
        """During the block; its call ends with `limit`."""
        host.groups[place.group_id] = place
        place.host, place.limit, place.waits_for = host, limit, ""
        place.finished_here = place.failed_here = 0
        host.achievement(place.environment).count(self._clock.now(), begun=place.left)
        try:
            yield
            self._judge(host, place, place.failed_here > 0)
        except MeshError as error:
            self._judge(host, place, error.reason in GROUP_ERRORS and host.state is not HostState.AWAY)
            raise
        except asyncio.CancelledError:
            self._judge(host, place, limit.expired() and host.state is not HostState.AWAY)
            raise
        finally:
            del host.groups[place.group_id]
            place.host = place.limit = None
            host.achievement(place.environment).count(self._clock.now(), begun=-place.left)

    def _judge(self, host: RolloutHost, place: GroupPlace, is_bad: bool) -> None:
        quarantine = host.achievement(place.environment).quarantine
        if place.finished_here:
            quarantine.group_went_well()
            host.refusal = ""
        elif is_bad and (lasts_s := quarantine.group_failed(self._clock.now())):
            logger.warning(
                f"the rollout service at {host.address} is left out of {place.environment!r} for {lasts_s:g} s, while"
                " others serve it: its groups failed or timed out again and again"
            )

    def why_left_out(self, address: str) -> str:
        """Empty without a reason."""
        found = next((host for host in self.table.hosts if host.address == address), None)
        if found is None or found.state is not HostState.SERVING:
            return "" if found is None else f"{found.state.value}: {found.why}"
        reasons = [found.why_not(name, self._clock.now(), self._newest_needed) for name in sorted(found.environments)]
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    @property
    def _newest_needed(self) -> int | None:
        return max((place.min_version for place in self.places.values()), default=None)

    def came_back(self, place: GroupPlace, *, left: int, failed: bool, tokens: int = 0) -> None:
        """`left` of its rollouts are missing."""
        ended = max(0, place.left - max(0, left))
        place.left -= ended
        place.finished_here += not failed
        place.failed_here += failed
        if place.host is not None:
            now_s = self._clock.now()
            place.host.achievement(place.environment).count(
                now_s, finished=0 if failed else ended, failed=ended if failed else 0, tokens=tokens
            )

    async def cancel(self, group_ids: Collection[str]) -> int:
        """Returns how many rollouts were stopped. Raises MeshError if one call fails."""
        at: dict[RolloutHost, list[str]] = {}
        for group_id in group_ids:
            place = self.places.get(group_id)
            if place is not None and place.host is not None:
                at.setdefault(place.host, []).append(group_id)
        calls = [self.client(host).cancel_rollouts(members) for host, members in at.items()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return sum(answer for answer in answers if isinstance(answer, int))

    def in_flight(self) -> str:
        now_s = self._clock.now()
        since_s: dict[tuple[str, str], list[float]] = {}
        for place in self.places.values():
            where = f"at {place.host.address}" if place.host else f"at no service ({place.waits_for or 'not sent yet'})"
            since_s.setdefault((place.environment, where), []).append(place.since_s)
        return "; ".join(
            f"{len(began_s)} of {environment!r} {where}, the oldest for {now_s - min(began_s):.0f} s"
            for (environment, where), began_s in sorted(since_s.items(), key=lambda item: min(item[1]))
        )
