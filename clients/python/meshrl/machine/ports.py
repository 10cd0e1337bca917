"""Free ports for servers that are about to start."""

from __future__ import annotations

import errno
import socket


def bound(host: str, *, shared: bool = False) -> socket.socket:
    """Bound to a free port of the host ("" is all of them), not listening. Raises OSError.

    While it is open the kernel gives the port to no socket that asks for any; with `shared` a server may still have it
    by number, on Linux alone.
    """
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))
        probe.bind((host, 0))
    except OSError:
        probe.close()
        raise
    return probe


def port_of(probe: socket.socket) -> int:
    return int(probe.getsockname()[1])


def why_not_free(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
        except OSError as problem:
            return "another process listens there" if problem.errno == errno.EADDRINUSE else str(problem)
    return None
