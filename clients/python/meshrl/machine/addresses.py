"""How a server's address is written, and how its own machine calls it."""

from __future__ import annotations

import ipaddress
import re
import socket

ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
"""Loopback of hosts that stand for all addresses: a server can bind them, a client cannot call them."""

_HOST_PORT = re.compile(r"(?:\[[^\[\]]+\]|[^\[\]:/\s]+):([0-9]{1,5})")


def address_of(host: str, port: int | str) -> str:
    """An IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(host: str, port: int | str) -> str:
    """For a caller on the machine of a server that has bound `host`."""
    return address_of(ANY_HOST.get(host, host), port)


def checked_address(address: str) -> str:
    """`address` if it is host:port or a Unix socket of gRPC. Raises ValueError else: gRPC would call port 443, or the
    port modulo 65536."""
    found = _HOST_PORT.fullmatch(address)
    if address.startswith("unix:") or (found is not None and 1 <= int(found[1]) <= 65535):
        return address
    raise ValueError(f"expected HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:50051, got {address!r}")


def is_of_this_machine(address: str) -> bool:
    """Names other than its own and localhost are not looked up."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", socket.gethostname())
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((host, 9))  # sends nothing; the way to an own address begins at that address
            return ip.is_loopback or ipaddress.ip_address(way.getsockname()[0]) == ip
    except OSError:
        return ip.is_loopback
