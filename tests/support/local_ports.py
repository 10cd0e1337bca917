"""Ports for programs that a test starts."""

from __future__ import annotations

import itertools
import os
import random
import socket

RANGE = range(12_000, 32_000)
"""Below those that systems hand out themselves: to a client, or to a server that takes any."""
SHARE = 1_250
"""Ports of one worker of pytest-xdist, so that no other draws one that is not bound yet."""


def _of_this_worker() -> range:
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = RANGE.start + number * SHARE % len(RANGE)
    return range(first, first + SHARE)


_PORTS = _of_this_worker()
_draws = itertools.count(random.SystemRandom().randrange(SHARE))


def free_port() -> int:
    """A port of the loopback that nobody listens on, and that is given to nobody else before it is bound."""
    for _ in _PORTS:
        port = _PORTS[next(_draws) % SHARE]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_PORTS} is free")
