"""Free ports for the servers of a run, kept from other runs on this machine while it lasts."""

from __future__ import annotations

import socket
import sys
from types import TracebackType
from typing import Self

from meshrl.core.config import ConfigError
from meshrl.machine.ports import bound, port_of

HOLDS = sys.platform == "linux"
"""Elsewhere no server may listen on a port to which another socket is bound."""


class FreePorts:
    """Each is given once and held until `close`: bound without listening, so that only a server that asks for it by
    number gets it, also after a restart."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._held: list[socket.socket] = []

    def __call__(self, host: str) -> int:
        """Raises ConfigError when the host is not one of this machine."""
        while True:
            try:
                probe = bound(host, shared=HOLDS)
            except OSError as error:
                raise ConfigError(
                    f"server.host {host!r}: no port can be bound there ({error}); use 127.0.0.1"
                ) from error
            port = port_of(probe)
            if HOLDS:
                self._held.append(probe)
            else:
                probe.close()
            if port not in self._given:
                self._given.add(port)
                return port

    @property
    def given(self) -> frozenset[int]:
        return frozenset(self._given)

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
