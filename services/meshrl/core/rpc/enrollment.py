"""The EnrollmentService of the weight hub: signs certificates for hosts that join, by the run's authority.

`Enroll` is served at a port of its own, where callers have no certificate yet; `Renew` and `ListRevoked` at the hub's
main port, behind the guard.
"""
# ruff: noqa: N802  # methods are named by the contract

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
from loguru import logger

from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles, FileCredentials
from meshrl.client.names import MAX_HOSTS
from meshrl.client.trust import TokenError, Trust
from meshrl.core.config.base import ConfigError
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.guard import certificate_of, member
from meshrl.core.rpc.paging import page_of
from meshrl.core.rpc.serve import GrpcServer
from meshrl.v1 import identity_pb2 as pb
from meshrl.v1 import identity_pb2_grpc
from meshrl.wire.errors import MeshError, Reason

SERVICE = "meshrl.v1.EnrollmentService"
MAX_REQUEST_BYTES = 16384

_T = TypeVar("_T")


class EnrollmentServicer(identity_pb2_grpc.EnrollmentServiceServicer):
    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self.renewal_port = 0

    async def Enroll(self, request: pb.EnrollRequest, context: grpc.aio.ServicerContext) -> pb.EnrollResponse:
        _check(request.request, request.hosts)
        role, certificates = await _off_loop(
            lambda: self._authority.enroll(request.token, request.name, request.request, list(request.hosts))
        )
        logger.info("{}/{} has joined by the token {}", role, request.name, request.token.partition(".")[0])
        return pb.EnrollResponse(
            certificates=certificates, run_id=self._authority.run, role=role.value, renewal_port=self.renewal_port
        )

    async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.RenewResponse:
        caller = member(certificate_of(context))
        _check(request.request)
        certificates = await _off_loop(lambda: self._authority.renew(caller.role, caller.name, request.request))
        logger.info("the certificate of {} is renewed", caller)
        return pb.RenewResponse(certificates=certificates)

    async def ListRevoked(
        self, request: pb.ListRevokedRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRevokedResponse:
        trust: Trust = await _off_loop(self._authority.trust.read)
        page, token = page_of(request, sorted(f"{role}/{name}" for role, name in trust.revoked), str)
        return pb.ListRevokedResponse(members=page, next_page_token=token)


async def open_entry(servicer: EnrollmentServicer, host: str, port: int) -> tuple[GrpcServer, int]:
    """Starts the server at which hosts join. Raises ConfigError without a certificate, or if the port cannot be
    bound."""
    files = CredentialFiles.from_environ(os.environ)
    if files.cert is None or files.key is None:
        raise ConfigError(
            "weights.enrollment_port needs a certificate of the run, and this hub has none; make the authority with"
            " `meshrl run init -o OUTPUT_DIR` before, or set tls.cert and tls.key"
        )
    credentials = FileCredentials(CredentialFiles(cert=files.cert, key=files.key), asks=False)
    server = GrpcServer(ServerConfig(host=host, port=port), credentials=credentials)
    server.add(SERVICE, identity_pb2_grpc.add_EnrollmentServiceServicer_to_server, servicer)
    bound = await server.start()
    server.set_serving()
    return server, bound


def _check(request: bytes, hosts: Sequence[str] = ()) -> None:
    if len(request) > MAX_REQUEST_BYTES or len(hosts) > MAX_HOSTS:
        raise MeshError(
            Reason.INVALID_REQUEST,
            f"a certificate request has at most {MAX_REQUEST_BYTES} bytes and {MAX_HOSTS} hosts, got"
            f" {len(request)} bytes and {len(hosts)} hosts",
        )


async def _off_loop(work: Callable[[], _T]) -> _T:
    try:
        return await asyncio.to_thread(work)
    except sqlite3.Error as error:
        raise MeshError(Reason.INTERNAL, f"the run's list of members cannot be used: {error}") from error
    except TokenError as error:
        raise MeshError(Reason.UNAUTHENTICATED, str(error)) from error
    except ValueError as error:
        raise MeshError(Reason.INVALID_REQUEST, str(error)) from error
