"""From whom a host fetches versions (relays first, the hub last), and over how many connections.

On a link that loses packets a single TCP connection reaches a few Mb/s at any capacity, so the number of connections is
doubled as long as that is faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshrl.client import WeightSyncClient
from meshrl.client.backoff import Backoff
from meshrl.core.config.shared import MOST_CONNECTIONS, WeightBroadcastConfig
from meshrl.machine.addresses import is_of_this_machine
from meshrl.versions.ranges import SILENT_S
from meshrl.wire.errors import MeshError

DEAD_S = 3.0  # without a byte, after which a relay is passed over
LEAVE_S = 10.0  # for the calls of a connection whose place another has taken
AVOID_S = (10.0, 60.0)  # how long a relay that failed is avoided, doubled from the first to the second
LEAST_PATIENCE_S = 0.5  # many connections share a line: each has to wait for the others
SMOOTHING = 0.7  # weight of a relay's earlier rate when it is measured again
FAR_S = 0.03  # of a first answer, from which on the other side counts as far away
FAR_COUNT = 8  # connections to start with, far away, and the most from near: more would only share the cores
MIN_GAIN = 1.1  # by which more connections must raise the rate, or they are closed again
PROBE_WINDOWS = 8  # measured windows after which more connections are tried once more


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """The most connections, the most megabits per second (0: no limit), and the longest silence in seconds."""

    connections: int = MOST_CONNECTIONS
    mbps: float = 0.0
    stall_s: float = 30.0

    @classmethod
    def of(cls, broadcast: WeightBroadcastConfig) -> LinkLimits:
        return cls(connections=broadcast.connections, mbps=broadcast.max_mbps, stall_s=broadcast.stall_s)


@dataclass(eq=False)
class ByteSource:
    """A relay or the hub. `rate` is in bytes/s, 0 while unknown; `answers_in_s` is the time of its fastest answer.

    A source on this machine is never far, however busy it is.
    """

    address: str
    is_hub: bool
    rate: float = 0.0
    answers_in_s: float = float("inf")
    heard_s: float | None = None
    avoid_until_s: float = 0.0
    _avoid: Backoff = field(default_factory=lambda: Backoff(*AVOID_S, jitter=0.0))

    def __post_init__(self) -> None:
        if is_of_this_machine(self.address):
            self.answers_in_s = 0.0

    @property
    def patience_s(self) -> float:
        """How long a claim may stand still until another connection fetches it as well."""
        return min(SILENT_S, max(LEAST_PATIENCE_S, self.answers_in_s)) if self.is_far else SILENT_S

    @property
    def is_far(self) -> bool:
        return FAR_S < self.answers_in_s < float("inf")

    @property
    def is_near(self) -> bool:
        return self.answers_in_s <= FAR_S

    def connections(self, most: int) -> int:
        return most if self.is_far else min(most, FAR_COUNT)

    def answered(self, seconds: float) -> None:
        self.answers_in_s = min(self.answers_in_s, seconds)

    def heard(self, now_s: float) -> None:
        self.heard_s = now_s
        self._avoid.reset()

    def measured(self, rate: float) -> None:
        self.rate = SMOOTHING * self.rate + (1 - SMOOTHING) * rate if self.rate else rate

    def failed(self, now_s: float, *, at_once: bool = False) -> bool:
        """Records a failed call; returns whether it is avoided now. `at_once`: even if bytes came a moment ago."""
        self.heard_s = now_s if self.heard_s is None else self.heard_s
        if not at_once and now_s - self.heard_s < DEAD_S:
            return False
        self.avoid_until_s, self.heard_s = now_s + self._avoid.next_s(), None
        return True


class ByteSources:
    """The relays and the hub, and which of them to ask next; a relay that brings nothing is avoided for a while."""

    def __init__(self, hub: str, relays: Sequence[str] = ()) -> None:
        self._hub = ByteSource(address=hub, is_hub=True)
        self._relays = [ByteSource(address=address, is_hub=False) for address in relays]

    def choose(self, now_s: float) -> ByteSource:
        """The fastest relay, each tried once in the order given; the hub without any."""
        there = [relay for relay in self._relays if relay.avoid_until_s <= now_s]
        return max(there, key=lambda relay: relay.rate or float("inf"), default=self._hub)


class ConnectionCount:
    """How many connections a download has, kept for the next one."""

    def __init__(self) -> None:
        self.count = 1
        self._best = (0.0, 1)  # rate and the number that made it
        self._windows = 0  # since the number was changed
        self._first = True

    def first_answer(self, seconds: float, most: int) -> None:
        """The first bytes of all came after so long: far away it begins with several connections."""
        if self._first and seconds > FAR_S:
            self.count = min(FAR_COUNT, most)
        self._first = False

    def measured(self, rate: float, most: int) -> None:
        """Takes the rate, in bytes/s, of the window that ends now, and decides on the number, up to `most`."""
        self._windows += 1
        if self.count > most:
            self._best = (rate, most)
            self._set(most)
        if self._windows == 1:  # connections were being opened
            return
        best, its_count = self._best
        if self.count > its_count and rate < MIN_GAIN * best:  # more of them did not pay
            self._set(its_count)
        elif self.count > its_count or best == 0.0 or self._windows >= PROBE_WINDOWS:
            self._best = (rate, self.count)
            self._set(min(2 * self.count, most))
        else:
            self._best = (max(best, rate), its_count)

    def _set(self, count: int) -> None:
        if count != self.count:
            self.count, self._windows = count, 0


class Connections:
    """The connections to all sources, by number, opened when first used."""

    def __init__(self, hub: WeightSyncClient) -> None:
        """The first connection to the hub is `hub`, which is not closed here."""
        self._hub = hub
        self._clients = {(hub.address, 0): hub}

    def get(self, source: ByteSource, number: int) -> WeightSyncClient:
        key = (source.address, number)
        if key not in self._clients:
            self._clients[key] = self._open(source)
        return self._clients[key]

    def _open(self, source: ByteSource) -> WeightSyncClient:
        return WeightSyncClient(source.address, self._hub.options, of_relay=not source.is_hub)

    async def renew(self, source: ByteSource, count: int, deadline_s: float) -> None:
        """Replaces the first `count` connections to a source, each used until the new one is open.

        Calls over the old ones go on, for LEAVE_S at most. Those without a new one after `deadline_s` stay.
        """

        async def renew_one(number: int) -> None:
            key, client = (source.address, number), self._open(source)
            leaving = client
            try:
                await client.wait_until_connected(deadline_s)
                leaving, self._clients[key] = self._clients.get(key, self._hub), client
                if leaving is not self._hub:
                    await leaving.close(LEAVE_S)
            except (MeshError, asyncio.CancelledError) as error:
                if leaving is not self._hub:
                    await leaving.close()
                if not isinstance(error, MeshError):
                    raise

        await asyncio.gather(*map(renew_one, range(count)))

    async def drop(self, source: ByteSource, number: int, failed: WeightSyncClient) -> None:
        """A call over it failed, and it may be broken without a sign: it is closed, under other calls too, and the next
        call opens another one."""
        if self._clients.get((source.address, number)) is failed:
            del self._clients[source.address, number]
            if failed is not self._hub:
                await failed.close()

    async def close(self) -> None:
        clients, self._clients = [*self._clients.values()], {(self._hub.address, 0): self._hub}
        await asyncio.gather(*(client.close() for client in clients if client is not self._hub))


class RateLimit:
    """Limits bytes sent or requested to `bytes_per_s` on average; 0 is no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, num_bytes: int) -> None:
        if not self.bytes_per_s:
            return
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + num_bytes / self.bytes_per_s
        await asyncio.sleep(begin_s - now_s)
