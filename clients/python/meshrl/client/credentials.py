"""How two programs of the mesh trust each other: one object opens every channel and adds every port.

Handed to the clients and to the server of a program. There is no encryption today, so a server binds to loopback unless
it is told otherwise; TLS and tokens become another class here, and nothing else asks what a connection is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

ChannelArguments = Sequence[tuple[str, int | str]]


class Credentials(Protocol):
    """Makes both ends of a connection."""

    @property
    def encrypted(self) -> bool:
        """Whether nobody on the way can read or change what is sent."""

    def open_channel(self, address: str, arguments: ChannelArguments) -> grpc.aio.Channel:
        """Returns a channel to the server at `address`; it connects with its first call."""

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Has a server that is not started listen at `address`; returns the port. Raises RuntimeError as grpc does."""


class InsecureCredentials:
    """Plain connections: for loopback, and for networks where every host is trusted."""

    encrypted = False

    def open_channel(self, address: str, arguments: ChannelArguments) -> grpc.aio.Channel:
        """As in `Credentials`."""
        return grpc.aio.insecure_channel(address, options=arguments)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """As in `Credentials`."""
        return int(server.add_insecure_port(address))


INSECURE = InsecureCredentials()
