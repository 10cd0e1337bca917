"""From whom a host fetches versions and over how many connections: relays first, the hub last; what pays is kept.

Used by `versions.downloads`, and by `versions.transfer` for uploads. Relays are told apart by the rate that they
brought and left alone for a while once they bring nothing. On a link that loses packets one TCP connection makes a few
Mb/s whatever the link could, so there are more of them as long as more bring more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.client import WeightSyncClient

DEAD_S = 3.0
"""A relay from which nothing came for so long is passed over."""

HELD_OFF_S = (10.0, 60.0)
KEPT = 0.7  # of a relay's rate, when it is measured anew
FAR_S = 0.03
FAR_COUNT = 8
PAYS = 1.1
PROBE_WINDOWS = 8


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
    """connections: the most of them; mbps: the most megabits per second, 0 for no limit; stall_s: give up after."""

    connections: int = 32
    mbps: float = 0.0
    stall_s: float = 30.0


@dataclass(eq=False)
class Parent:
    """A relay, or the hub itself (`is_hub`), with what is known of it. `rate` in bytes/s, 0 while it is unknown."""

    address: str
    is_hub: bool
    rate: float = 0.0
    heard_s: float | None = None
    away_until_s: float = 0.0
    _hold_s: float = HELD_OFF_S[0]

    def heard(self, now_s: float) -> None:
        """Something came from it."""
        self.heard_s, self._hold_s = now_s, HELD_OFF_S[0]

    def measured(self, rate: float) -> None:
        """It brought so many bytes/s."""
        self.rate = KEPT * self.rate + (1 - KEPT) * rate if self.rate else rate

    def failed(self, now_s: float, *, at_once: bool = False) -> bool:
        """A call to it failed; whether it is passed over now. `at_once`: however lately something came from it."""
        self.heard_s = now_s if self.heard_s is None else self.heard_s
        if not at_once and now_s - self.heard_s < DEAD_S:
            return False
        self.away_until_s, self.heard_s = now_s + self._hold_s, None
        self._hold_s = min(2 * self._hold_s, HELD_OFF_S[1])
        return True


class Parents:
    """Where versions come from."""

    def __init__(self, hub: str, relays: Sequence[str] = ()) -> None:
        """Addresses, host:port."""
        self._hub = Parent(address=hub, is_hub=True)
        self._relays = [Parent(address=address, is_hub=False) for address in relays]

    def choose(self, now_s: float) -> Parent:
        """The fastest relay of those that are there, each tried once in the order given; the hub where none is."""
        there = [relay for relay in self._relays if relay.away_until_s <= now_s]
        return max(there, key=lambda relay: relay.rate or float("inf"), default=self._hub)


class ConnectionCount:
    """How many connections a transfer has: doubled while that brings more, up to `most`; kept for the next one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 1
        self._best = (0.0, 1)  # rate and the number that made it
        self._windows = 0  # since the number was changed
        self._first = True

    def first_answer(self, seconds: float) -> None:
        """The first bytes of all came so late: from far away a few connections are sure to pay."""
        if self._first and seconds > FAR_S:
            self.count = min(FAR_COUNT, self._most)
        self._first = False

    def measured(self, rate: float) -> None:
        """So many bytes/s came in the window that ends now."""
        self._windows += 1
        if self._windows == 1:  # connections were being opened
            return
        best, its_count = self._best
        if self.count > its_count and rate < PAYS * best:  # more of them did not pay
            self._set(its_count)
        elif self.count > its_count or best == 0.0 or self._windows >= PROBE_WINDOWS:
            self._best = (rate, self.count)
            self._set(min(2 * self.count, self._most))
        else:
            self._best = (max(best, rate), its_count)

    def _set(self, count: int) -> None:
        if count != self.count:
            self.count, self._windows = count, 0


class Connections:
    """The connections to all parents, by number; each is opened when it is first used, and stays."""

    def __init__(self, hub: WeightSyncClient) -> None:
        """The first connection to the hub is that of `hub`, which belongs to somebody else."""
        self._hub = hub
        self._clients = {(hub.address, 0): hub}
        self._dropped: dict[tuple[str, int], WeightSyncClient] = {}

    def get(self, parent: Parent, number: int) -> WeightSyncClient:
        """The connection of this number to a parent."""
        key = (parent.address, number)
        if key not in self._clients:
            self._clients[key] = WeightSyncClient(parent.address, self._hub.options)
        return self._clients[key]

    async def drop(self, parent: Parent, number: int, failed: WeightSyncClient) -> None:
        """The connection may be broken without anybody having said so: the next call opens another one."""
        key = (parent.address, number)
        if self._clients.get(key) is not failed:
            return
        del self._clients[key]
        before = self._dropped.pop(key, None)
        if failed is not self._hub:
            self._dropped[key] = failed  # another call may be about to use it
        if before is not None:
            await before.close()

    async def close(self) -> None:
        """Ends all of them but the first."""
        clients = [*self._clients.values(), *self._dropped.values()]
        self._clients, self._dropped = {(self._hub.address, 0): self._hub}, {}
        await asyncio.gather(*(client.close() for client in clients if client is not self._hub))


class RateLimit:
    """Lets so many bytes/s through on average; 0 is no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, num_bytes: int) -> None:
        """Waits for the turn of these bytes."""
        if not self.bytes_per_s:
            return
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + num_bytes / self.bytes_per_s
        await asyncio.sleep(begin_s - now_s)
