"""Sites that share nothing but a bad internet: network namespaces whose only way out is `wan_forwarder`.

`open_wan` gives each site an address and a line; programs are started in them with `Wan.start`. Needs root, `ip` and
/dev/net/tun: `why_not` says what is missing. TCP in the sites uses cubic, which loss slows down, as most hosts do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORWARDER = Path(__file__).with_name("wan_forwarder.py")
PEER = Path(__file__).with_name("wan_peer.py")
DEADLINE_S = 60.0
CONGESTION_CONTROL = "cubic"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A site's line to the internet: Mb/s each way (0: no limit), delay and share of packets lost each way."""

    down_mbps: float = 0.0
    up_mbps: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    nat: bool = False

    def told(self) -> dict[str, Any]:
        """As the forwarder is told."""
        both = {"delay_s": self.delay_s, "loss": self.loss}
        return {
            "up": {"rate": self.up_mbps * 125_000, **both},
            "down": {"rate": self.down_mbps * 125_000, **both},
            "nat": self.nat,
        }


PERFECT = Line()
BAD = Line(down_mbps=100.0, up_mbps=100.0, delay_s=0.05, loss=0.01)
"""100 ms there and back, 1% lost, 100 Mb/s."""


def why_not() -> str:
    """Why there can be no sites on this machine; empty when there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    made = subprocess.run(["ip", "netns", "add", f"meshrl-try-{os.getpid()}"], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    ip("netns", "del", f"meshrl-try-{os.getpid()}")
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=DEADLINE_S, capture_output=True)


class Wan:
    """The sites by name, and the internet between them."""

    def __init__(self, prefix: str, addresses: dict[str, str], forwarder: subprocess.Popen[str], undo: ExitStack):
        self.addresses, self._prefix, self._forwarder, self._undo = addresses, prefix, forwarder, undo

    def change(self, site: str = "", **told: Any) -> dict[str, dict[str, int]]:
        """Changes a site's line: `hole_s` seconds without any packet, `forget=True` the flows of its NAT, `line`.

        Returns the bytes that have gone up and down each site's line.
        """
        line = told.pop("line", None)
        change = {"name": site, **({} if line is None else line.told()), **told} if site else {}
        assert self._forwarder.stdin is not None
        assert self._forwarder.stdout is not None
        self._forwarder.stdin.write(json.dumps(change) + "\n")
        self._forwarder.stdin.flush()
        sent: dict[str, dict[str, int]] = json.loads(self._forwarder.stdout.readline())
        return sent

    def start(self, site: str, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Starts a program at a site; it ends with the sites at the latest."""
        inside = ["ip", "netns", "exec", f"{self._prefix}{site}", *command]
        process = subprocess.Popen(inside, text=True, **more)
        self._undo.callback(end, process)
        return process


def end(process: subprocess.Popen[str]) -> None:
    """Kills a program and closes what leads to it."""
    process.kill()
    process.wait(timeout=DEADLINE_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


class Peer:
    """A program of `wan_peer` at a site."""

    def __init__(self, wan: Wan, site: str, *arguments: str, checkout: Path | None = None) -> None:
        """`checkout`: another checkout of this repository, whose program and environment are used."""
        program = [sys.executable, str(PEER)]
        if checkout is not None:
            program = [str(checkout / ".venv/bin/python"), str(checkout / "tests/wan/wan_peer.py")]
        command = [*program, *arguments]
        self.process = wan.start(site, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self) -> None:
        """Sends it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def until(self, key: str, at_most: int | None = None, *, at_least: int = 0) -> dict[str, Any]:
        """What it says next of `key`, once that is `at_most`, or `at_least`, so much."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            told: dict[str, Any] = json.loads(line)
            if key in told and (at_most is None or told[key] <= at_most) and (not at_least or told[key] >= at_least):
                return told
        raise AssertionError(f"it ended and did not say {key}")

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait(timeout=60.0)


@contextmanager
def open_wan(lines: dict[str, Line]) -> Iterator[Wan]:
    """Makes the sites; everything that was started in them has ended after it."""
    prefix = f"w{os.getpid()}-"
    with ExitStack() as undo:
        addresses, told = {}, []
        for number, (site, line) in enumerate(lines.items(), start=1):
            space = f"{prefix}{site}"
            ip("netns", "add", space)
            undo.callback(ip, "netns", "del", space)
            addresses[site] = f"10.88.0.{number}"
            place = f"/var/run/netns/{space}"
            told.append({"name": site, "space": place, "address": addresses[site], **line.told()})
        forwarder = subprocess.Popen(
            [sys.executable, str(FORWARDER), json.dumps(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        undo.callback(end, forwarder)
        assert forwarder.stdout is not None
        if forwarder.stdout.readline().strip() != "ready":
            raise RuntimeError("the forwarder did not start")
        for site, address in addresses.items():
            space = f"{prefix}{site}"
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "wan", "noprefixroute")
            ip("-n", space, "link", "set", "wan", "mtu", "1500", "up")
            # By the route: a namespace may be forbidden to change its default.
            ip("-n", space, "route", "add", "10.88.0.0/24", "dev", "wan", "src", address, "congctl", CONGESTION_CONTROL)
            ip("-n", space, "link", "set", "lo", "up")
        yield Wan(prefix, addresses, forwarder, undo)
