"""What somebody with a token tries, to pose as another server of a run; started at a site it prints how each try ends.

python impostor.py enroll ADDRESS CA_HASH TOKEN NAME HOST...   tries to enrol under NAME with each HOST
python impostor.py serve FOLDER ADDRESS                        serves WeightSync with the certificate in FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc
from cryptography.hazmat.primitives import serialization

from meshrl.client.authority import request_for
from meshrl.client.credentials import CredentialFiles, credentials_of
from meshrl.client.enrollment import pinned_authority
from meshrl.client.names import server_name
from meshrl.client.trust import Role
from meshrl.v1 import identity_pb2, identity_pb2_grpc, weights_pb2, weights_pb2_grpc

CALL_S = 60.0

WIDE = str.maketrans({chr(code): chr(code + 0xFEE0) for code in range(0x21, 0x7F)})
"""Characters that Unicode takes for those of ASCII."""

SPELLINGS_OF_THE_HUB = (
    "hub.meshrl", "HUB.MESHRL", "Hub.MeshRL", "hub.meshrl.", "HUB.meshrl.", "hub.meshrl..", ".hub.meshrl", "*.meshrl",
    "*", "h*b.meshrl", "hub.*", "meshrl", "MESHRL.", "x.hub.meshrl", "hub-1.meshrl", "relay.meshrl", "Relay.Meshrl.",
    "hub.meshrl ", " hub.meshrl", "hub .meshrl", "hub.meshrl\t", "hub.meshrl\n", "hub.meshrl\r\n", "hub\u00a0.meshrl",
    "hub.meshrl\0", "hub.meshrl\0.example.org", "example.org\0hub.meshrl", "hub\u3002meshrl", "hub\uff0emeshrl",
    "hub\uff61meshrl", "hub.meshrl".translate(WIDE), "hub.".translate(WIDE) + "meshrl", "hub.meshr\u2113",
    "hub.mesh\u00adrl", "hub.meshrl\u200b", "hub.\u2060meshrl", "xn--hub-.meshrl", "hub.xn--meshrl-",
    "hub.meshrl:50053", "https://hub.meshrl", "hub.meshrl/", "user@hub.meshrl", "hub,hub.meshrl", "DNS:hub.meshrl",
    "hub%2emeshrl",
)  # fmt: skip
OTHERS_HOSTS = (
    "hub.example.org", "HUB.example.org.", "*.example.org", "hub".translate(WIDE) + ".example.org", "localhost",
    "LOCALHOST.", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "::1", "[::1]", "0:0:0:0:0:0:0:1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.1", "010.0.0.1", "10.0.0.1/32", "0.0.0.0/0",
    "0.0.0.0", "", ".", "e2.example.org", "e1.example.org.evil.org", "e1.example.org,hub.example.org",
    "e1.example.org\0.hub.example.org", "10.2.0.300",
)  # fmt: skip
NAMES_OF_NOBODY = (
    "hub.meshrl", "HUB.MESHRL", "hub.meshrl.", "../hub", "hub/x", "hub\0", "a b", "*", "hub".translate(WIDE), "",
    "x" * 64,
)  # fmt: skip


async def enroll(ca_hash: str, address: str, token: str, name: str, request: bytes, hosts: Sequence[str] = ()) -> bytes:
    """Enrols as an attacker would, with a message of its own; returns the certificate. Raises AioRpcError."""
    pinned = pinned_authority(address, ca_hash).public_bytes(serialization.Encoding.PEM)
    options = [("grpc.ssl_target_name_override", server_name(Role.HUB))]
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pinned), options=options) as channel:
        stub = identity_pb2_grpc.EnrollmentServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        message = identity_pb2.EnrollRequest(token=token, name=name, request=request, hosts=hosts)
        return bytes((await stub.Enroll(message, timeout=CALL_S)).certificates)


async def _enroll(address: str, ca_hash: str, token: str, name: str, *hosts: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        request = request_for(Path(folder), name)
        for host in hosts:
            asked = json.loads(host)
            try:
                await enroll(ca_hash, address, token, name, request, asked)
                ended = "granted"
            except grpc.aio.AioRpcError as error:
                ended = f"{error.code().name}: {error.details()}"
            sys.stdout.write(json.dumps({"asked": asked, "ended": ended}) + "\n")


class Engines(weights_pb2_grpc.WeightSyncServicer):
    """Lists no engines, for whoever asks."""

    async def ListEngines(  # noqa: N802  # the contract's name
        self, request: weights_pb2.ListEnginesRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.ListEnginesResponse:
        return weights_pb2.ListEnginesResponse()


async def _serve(folder: str, address: str) -> None:
    server = grpc.aio.server()
    weights_pb2_grpc.add_WeightSyncServicer_to_server(Engines(), server)  # type: ignore[no-untyped-call]  # generated
    files = CredentialFiles.of_folder(Path(folder))
    credentials_of(CredentialFiles(ca=files.ca, cert=files.cert, key=files.key)).add_port(server, address)
    await server.start()
    sys.stdout.write("serves\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run((_enroll if sys.argv[1] == "enroll" else _serve)(*sys.argv[2:]))
