"""How a host joins a run by a token, and renews its certificate before it expires.

The token comes with the hash of the authority's key, which is compared with the server's authority before anything is
sent.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf.message import Message

from meshrl.client.authority import key_hash, request_for, save_certificate, why_not_now
from meshrl.client.credentials import TRUST_FILE, Credentials
from meshrl.client.names import canonical_host, member_name, server_name
from meshrl.client.private import write_private
from meshrl.client.trust import Role, TrustFile
from meshrl.v1 import identity_pb2 as pb
from meshrl.v1 import identity_pb2_grpc
from meshrl.wire.errors import MeshError, Reason, from_rpc_error

_AnswerT = TypeVar("_AnswerT")

CALL_S = 20.0
RENEWAL_FILE = "renewal"
_SERVER = Role.HUB


async def join(
    folder: Path, address: str, *, token: str, ca_hash: str, name: str, hosts: Sequence[str] = ()
) -> tuple[str, Role]:
    """Fills `folder` with a member's credentials; returns the run's name and the member's role.

    `address` is the enrollment server's, `ca_hash` sha256:HEX. `hosts` of the token go into the certificate, by default
    all. Raises MeshError, and ValueError for a bad name.
    """
    name, hosts = member_name(name), list(map(canonical_host, hosts))
    authority = await asyncio.to_thread(pinned_authority, address, ca_hash)
    pem = authority.public_bytes(serialization.Encoding.PEM)
    options = [("grpc.ssl_target_name_override", server_name(_SERVER)), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pem), options=options) as channel:
        stub = identity_pb2_grpc.EnrollmentServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        request = pb.EnrollRequest(token=token, name=name, request=request_for(folder, name), hosts=hosts)
        answer = await _answer(stub.Enroll, request, address)
    save_certificate(folder, answer.certificates)
    host, _, _ = address.rpartition(":")
    write_private(folder / RENEWAL_FILE, f"{host}:{answer.renewal_port}\n".encode())
    TrustFile(folder / TRUST_FILE).create()
    return answer.run_id, Role(answer.role)


async def renew(folder: Path, credentials: Credentials) -> None:
    """Raises MeshError, OSError."""
    address = renewal_address(folder)
    async with credentials.open_channel(address, [], _SERVER) as channel:
        stub = identity_pb2_grpc.EnrollmentServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        answer = await _answer(stub.Renew, pb.RenewRequest(request=request_for(folder, "renewal")), address)
    save_certificate(folder, answer.certificates)


async def revoked_members(folder: Path, credentials: Credentials) -> set[tuple[str, str]]:
    """(role, name) of each. Raises MeshError, OSError."""
    address = renewal_address(folder)
    async with credentials.open_channel(address, [], _SERVER) as channel:
        stub = identity_pb2_grpc.EnrollmentServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        answer = await _answer(stub.ListRevoked, pb.ListRevokedRequest(), address)
    members = (member.partition("/") for member in answer.members)
    return {(role, name) for role, _, name in members}


def renewal_address(folder: Path) -> str:
    return (folder / RENEWAL_FILE).read_text(encoding="ascii").strip()


def pinned_authority(address: str, ca_hash: str) -> x509.Certificate:
    """The server's authority, if its key has this hash. Blocking.

    Raises UNREACHABLE, and UNAUTHENTICATED for another authority, or certificates that are not valid by the clock.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the hash decides, before anything is said
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), CALL_S) as raw,
            context.wrap_socket(raw, server_hostname=server_name(_SERVER)) as connection,
        ):
            # What the server shows, unverified. Public in ssl from Python 3.13 on; until then its object has it.
            chain = connection._sslobj.get_unverified_chain()  # type: ignore[attr-defined]  # see above
            shown = [x509.load_pem_x509_certificate(each.public_bytes().encode()) for each in chain or ()]
    except (OSError, ValueError) as error:
        raise MeshError(
            Reason.UNREACHABLE,
            f"no TLS server answers at {address}: {error}; name the hub's enrollment port",
        ) from error
    for certificate in shown:
        if hmac.compare_digest(key_hash(certificate), ca_hash):
            if why := next(filter(None, map(why_not_now, shown)), ""):
                raise MeshError(Reason.UNAUTHENTICATED, f"the certificate of the server at {address} {why}")
            return certificate
    raise MeshError(
        Reason.UNAUTHENTICATED,
        f"the server at {address} is not of the run with {ca_hash}: do not trust it; check address and hash",
    )


async def _answer(call: Callable[..., Awaitable[_AnswerT]], request: Message, address: str) -> _AnswerT:
    try:
        return await call(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, call=f"EnrollmentService of {address}", deadline_s=CALL_S) from error
