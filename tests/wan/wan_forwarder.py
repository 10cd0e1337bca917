"""The internet of `wan_rig`: moves packets between TUN devices in network namespaces, late, slowly and not all of them.

A process of its own, `wan_forwarder.py '[{"space": "/var/run/netns/a", "address": "10.88.0.1", ...}, ...]'`. Each site
has a line to the internet with a rate and a delay each way and a share of packets that are lost; a packet goes up one
line and down another. Every line on stdin is a JSON object that changes one site, and is answered on stdout with the
bytes that each site has had. A site with `nat` knows the flows that began with a SYN: packets of any other are dropped
without a word, as by a NAT that has forgotten them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
QUEUE_S = 0.1  # what waits longer for its turn is dropped, as by a router
BATCH = 64
SYN, ACK, TCP = 0x02, 0x10, 6


@dataclass
class Direction:
    """One way of a line. `rate` is in bytes/s, 0 for as many as come."""

    rate: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    free_s: float = 0.0
    bytes: int = 0
    packets: int = 0

    def pass_at(self, size: int, now_s: float) -> float | None:
        """When a packet is through; None: it is lost."""
        if self.loss and random.random() < self.loss:
            return None
        if self.rate:
            begin_s = max(now_s, self.free_s)
            if begin_s - now_s > QUEUE_S:
                return None
            self.free_s = now_s = begin_s + size / self.rate
        self.bytes += size
        self.packets += 1
        return now_s + self.delay_s


@dataclass
class Site:
    """A namespace and its line."""

    fd: int
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    hole_until_s: float = 0.0
    nat: bool = False
    flows: set[bytes] = field(default_factory=set)

    def knows(self, packet: bytes, flow: bytes) -> bool:
        """Whether a packet of this site's passes its NAT."""
        if not self.nat or packet[9] != TCP or flow in self.flows:
            return True
        if packet[33] & (SYN | ACK) == SYN:  # options before the ports are not used here
            self.flows.add(flow)
            return True
        return False

    def change(self, told: dict[str, Any]) -> None:
        for name in ("up", "down"):
            for key, value in told.get(name, {}).items():
                setattr(getattr(self, name), key, value)
        if "hole_s" in told:
            self.hole_until_s = time.monotonic() + told["hole_s"]
        self.nat = told.get("nat", self.nat)
        if told.get("forget"):
            self.flows.clear()


def open_tun(space: str) -> int:
    """A TUN device called `wan` in a namespace, which it stays in."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(space) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"wan", IFF_TUN | IFF_NO_PI))
    return fd


class Internet:
    """All sites by address, and the packets on their way."""

    def __init__(self, sites: dict[bytes, Site]) -> None:
        self.sites = sites
        self._due: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def take(self, site: Site) -> None:
        """Takes what a site sends."""
        for _ in range(BATCH):
            try:
                packet = os.read(site.fd, 65536)
            except BlockingIOError:
                return
            if len(packet) < 24 or packet[0] != 0x45:  # IPv4 without options
                continue
            target = self.sites.get(packet[16:20])
            now_s = time.monotonic()
            if target is None or site.hole_until_s > now_s or target.hole_until_s > now_s:
                continue
            there, back = packet[12:24], packet[16:20] + packet[12:16] + packet[22:24] + packet[20:22]
            if not site.knows(packet, there) or (target.nat and packet[9] == TCP and back not in target.flows):
                continue
            due_s = site.up.pass_at(len(packet), now_s)
            due_s = None if due_s is None else target.down.pass_at(len(packet), due_s)
            if due_s is not None:
                self._number += 1
                heapq.heappush(self._due, (due_s, self._number, target.fd, packet))

    def deliver(self) -> float | None:
        """Hands over what is due; returns the seconds to the next packet."""
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, fd, packet = heapq.heappop(self._due)
            try:
                os.write(fd, packet)
            except OSError as error:  # the device is full, or down: a router would drop it, too
                if error.errno not in (errno.EAGAIN, errno.EIO, errno.ENOBUFS):
                    raise
        return self._due[0][0] - now_s if self._due else None


def main() -> None:
    with suppress(PermissionError):
        os.nice(-10)  # an internet does not wait for the programs at its ends
    told = json.loads(sys.argv[1])
    by_name: dict[str, Site] = {}
    sites: dict[bytes, Site] = {}
    for each in told:
        site = sites[socket.inet_aton(each["address"])] = by_name[each["name"]] = Site(fd=open_tun(each["space"]))
        site.change(each)
    internet, selector = Internet(sites), selectors.EpollSelector()
    for site in sites.values():
        selector.register(site.fd, selectors.EVENT_READ, site)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    print("ready", flush=True)
    wait_s: float | None = None
    while True:
        for key, _ in selector.select(wait_s):
            if key.data is not None:
                internet.take(key.data)
                continue
            line = sys.stdin.readline()
            if not line:
                return
            change = json.loads(line)
            if change:
                by_name[change["name"]].change(change)
            sent = {name: {"up": site.up.bytes, "down": site.down.bytes} for name, site in by_name.items()}
            print(json.dumps(sent), flush=True)
        wait_s = internet.deliver()


if __name__ == "__main__":
    main()
