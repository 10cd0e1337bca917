"""Ports for programs that a test starts."""

from __future__ import annotations

import random
import socket

RANGE = range(12_000, 32_000)
"""Below those that systems hand out themselves: to a client, or to a server that takes any."""


def free_port() -> int:
    """A port of the loopback that nobody listens on, and that the system gives to nobody before it is bound."""
    draw = random.SystemRandom()
    for _ in range(1000):
        with socket.socket() as probe:
            port = draw.choice(RANGE)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of 1000 ports in {RANGE} is free")
