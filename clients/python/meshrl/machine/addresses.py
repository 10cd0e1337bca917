"""How the address of a server is written, and how it is called from its own machine."""

from __future__ import annotations

ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
"""Hosts that stand for all addresses of a machine, which a server can bind and nobody can call; with its loopback."""


def address_of(host: str, port: int | str) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(host: str, port: int | str) -> str:
    """host:port by which a program of its machine calls a server that has bound this host."""
    return address_of(ANY_HOST.get(host, host), port)
