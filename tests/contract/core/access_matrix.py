"""Members of a run; servers that offer every service of the contract and implement none, and what each role is told."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

import meshrl.v1
from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles, Credentials
from meshrl.client.trust import Role
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.roles import ROLES_OF
from meshrl.core.rpc.serve import GrpcServer
from meshrl.wire.errors import MeshError, Reason, from_rpc_error

DEADLINE_S = 60.0


def member(
    authority: Authority, role: Role, name: str, hosts: Sequence[str] = (), *, ttl_s: float = 3600.0
) -> CredentialFiles:
    """Files of a member beside the authority, which knows who is revoked."""
    folder = authority.folder / f"{role}-{name}"
    authority.issue(folder, role, name, hosts=hosts, ttl_s=ttl_s)
    return replace(CredentialFiles.of_folder(folder), trust=authority.trust.path)


def servicers() -> list[tuple[str, Callable[[Any, Any], None], object]]:
    """Every service of the contract, with the generated servicer that offers nothing."""
    found = []
    for path in sorted(Path(next(iter(meshrl.v1.__path__))).glob("*_pb2_grpc.py")):
        stubs = importlib.import_module(f"meshrl.v1.{path.stem}")
        messages = importlib.import_module(f"meshrl.v1.{path.stem.removesuffix('_grpc')}")
        for service in messages.DESCRIPTOR.services_by_name.values():
            adder = getattr(stubs, f"add_{service.name}Servicer_to_server")
            found.append((service.full_name, adder, getattr(stubs, f"{service.name}Servicer")()))
    return found


@asynccontextmanager
async def serving(credentials: Credentials, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A server that offers every service of the contract and implements none; yields its address."""
    server = GrpcServer(ServerConfig(host=host), credentials=credentials)
    for service, adder, servicer in servicers():
        server.add(service, adder, servicer)
    port = await server.start()
    server.set_serving()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(0.0)


async def outcome(channel: grpc.aio.Channel, method: str, credentials: Credentials) -> MeshError:
    """How a call without a message ends; a server that lets the caller in says that it does not offer the method."""
    call = channel.stream_stream(f"/{method}")(timeout=DEADLINE_S, metadata=credentials.metadata())
    try:
        with suppress(grpc.aio.InternalError):  # refused before the end of the requests; the status comes below
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, call=method)
    raise AssertionError(f"{method} was answered")


@dataclass
class Matrix:
    """What each role was told about each RPC."""

    wrong: list[str] = field(default_factory=list)
    told: dict[Reason, int] = field(default_factory=dict)

    async def fill(self, address: str, credentials: Credentials, role: Role) -> None:
        async with credentials.open_channel(address, [], Role.HUB) as channel:
            for method, allowed in ROLES_OF.items():
                error = await outcome(channel, method, credentials)
                self.told[error.reason] = self.told.get(error.reason, 0) + 1
                may = error.reason in (Reason.NOT_SUPPORTED, Reason.INVALID_REQUEST)
                refused = error.reason is Reason.PERMISSION_DENIED and f"/{method.partition('/')[2]}" in error.message
                if not (may if role in allowed else refused):
                    self.wrong.append(f"{role} {method}: {error}")
