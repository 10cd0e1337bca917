"""A gRPC server of the mesh in the process of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import GrpcServer


@asynccontextmanager
async def served(service: str, add: Callable[[Any, Any], None], servicer: Any, **options: Any) -> AsyncIterator[str]:
    """The address of a server with this servicer; `options` as of GrpcServer."""
    server = GrpcServer(ServerConfig(), **options)
    server.add(service, add, servicer)
    address = f"127.0.0.1:{await server.start()}"
    server.set_serving()
    try:
        yield address
    finally:
        await server.drain(0.0)
