"""What mutual TLS and tokens cost on loopback: unary calls a second, one stream's MB/s, how long a first call takes.

`python tests/benchmarks/bench_tls.py` prints one table. Client and server are a process each; the kinds take turns, so
that a machine whose load changes slows all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from loguru import logger

from meshrl.client import ChannelOptions, TrainerClient
from meshrl.client.authority import Authority
from meshrl.client.credentials import INSECURE, CredentialFiles, Credentials, credentials_of
from meshrl.client.trust import Role, TrustFile
from meshrl.core.rpc.serve import GrpcServer
from meshrl.v1 import trainer_pb2, trainer_pb2_grpc, weights_pb2
from meshrl.wire import frames
from meshrl.wire.errors import MeshError, Reason, from_rpc_error

CHUNK = bytes(2 * 2**20)
KINDS = ("plain", "token", "mutual TLS")


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    async def GetTrainer(self, request: Any, context: Any) -> Any:  # noqa: N802  # the contract's name
        return trainer_pb2.GetTrainerResponse(contract_version="1.0", seq_len=8)


class Hub:
    """Sends chunks for as long as it is asked."""

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802  # the same
        while True:
            yield CHUNK

    def __getattr__(self, name: str) -> Any:
        async def nothing(request: Any, context: Any) -> None:
            raise NotImplementedError

        return nothing


def files_of(folder: Path, kind: str, side: str) -> Credentials:
    """One side's credentials of one kind."""
    if kind == "plain":
        return INSECURE
    if kind == "token":
        trust, token = folder / "trust.sqlite", folder / "token"
        return credentials_of(CredentialFiles(trust=trust) if side == "server" else CredentialFiles(token=token))
    files = CredentialFiles.of_folder(folder / side)
    return credentials_of(replace(files, trust=folder / "trust.sqlite") if side == "server" else files)


def serve(folder: Path, pipe: Connection) -> None:
    """Serves all kinds until the pipe says to stop; tells their ports first."""
    logger.remove()

    async def run() -> None:
        servers = {}
        for kind in KINDS:
            listen = SimpleNamespace(host="127.0.0.1", port=0, insecure=False)
            server = GrpcServer(listen, credentials=files_of(folder, kind, "server"))
            server.add("meshrl.v1.TrainerService", trainer_pb2_grpc.add_TrainerServiceServicer_to_server, Trainer())
            server.add(frames.SERVICE, frames.add_weight_sync, Hub())
            servers[kind] = (server, await server.start())
        pipe.send({kind: port for kind, (_, port) in servers.items()})
        await asyncio.to_thread(pipe.recv)
        for server, _ in servers.values():
            await server.drain(0.0)

    asyncio.run(run())


class _Client(TrainerClient):
    server_role = "relay"


@dataclass
class Rates:
    first_ms: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    at_once_s: list[float] = field(default_factory=list)
    mb_s: list[float] = field(default_factory=list)


async def measure(address: str, credentials: Credentials, seconds: float, rates: Rates) -> None:
    began = time.perf_counter()
    async with _Client(address, ChannelOptions(credentials=credentials)) as client:
        await client.get_trainer()
        rates.first_ms.append(1e3 * (time.perf_counter() - began))
        for width, into in ((1, rates.calls_s), (32, rates.at_once_s)):
            calls, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                await asyncio.gather(*(client.get_trainer() for _ in range(width)))
                calls += width
            into.append(calls / (time.perf_counter() - began))
        fetch = client._channel.unary_stream(
            frames.FETCH, request_serializer=weights_pb2.FetchRequest.SerializeToString
        )
        stream = fetch(weights_pb2.FetchRequest(), metadata=credentials.metadata())
        await stream.read()
        size, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            size += len(await stream.read())
        rates.mb_s.append(size / 1e6 / (time.perf_counter() - began))
        stream.cancel()


def prepare(folder: Path) -> None:
    """Makes the credentials of both sides."""
    authority = Authority.create(folder, "bench")
    authority.issue(folder / "server", Role.RELAY, "server")
    authority.issue(folder / "client", Role.OPERATOR, "client")
    (folder / "token").write_text(TrustFile(folder / "trust.sqlite").add_token(Role.OPERATOR))


async def shut_out(folder: Path, kind: str, address: str) -> tuple[float, float]:
    """Seconds from a revocation until a stream that stands has ended, and until a new call is refused."""
    credentials = files_of(folder, kind, "client")
    trust = TrustFile(folder / "trust.sqlite")
    async with credentials.open_channel(address, [], "relay") as channel:
        fetch = channel.unary_stream(frames.FETCH, request_serializer=weights_pb2.FetchRequest.SerializeToString)
        stream = fetch(weights_pb2.FetchRequest(), metadata=credentials.metadata())
        await stream.read()
        what = "operator/client" if kind == "mutual TLS" else (folder / "token").read_text().partition(".")[0]
        assert trust.revoke(what)
        began = time.perf_counter()
        told = await ending(stream)
        ended_s = time.perf_counter() - began
    async with _Client(address, ChannelOptions(credentials=credentials)) as client:
        while told is Reason.UNAUTHENTICATED and await refusal(client) is not Reason.UNAUTHENTICATED:
            pass
    return ended_s, time.perf_counter() - began


async def ending(stream: Any) -> Reason:
    """Why a stream ends."""
    try:
        while True:
            await stream.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, call="Fetch").reason


async def refusal(client: _Client) -> Reason | None:
    """Why a call is refused; None where it is answered."""
    try:
        await client.get_trainer()
    except MeshError as error:
        return error.reason
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, theirs))
        process.start()
        try:
            ports = ours.recv()
            found = {kind: Rates() for kind in KINDS}
            for _ in range(args.rounds):
                for kind in KINDS:
                    made = files_of(folder, kind, "client")
                    asyncio.run(measure(f"127.0.0.1:{ports[kind]}", made, args.seconds, found[kind]))
            gone = {
                kind: asyncio.run(shut_out(folder, kind, f"127.0.0.1:{ports[kind]}"))
                for kind in ("token", "mutual TLS")
            }
            ours.send("stop")
            process.join(30)
        finally:
            process.kill()
    print("| connection | first call, ms | calls/s, one by one | calls/s, 32 at once | one stream, MB/s |")
    print("|---|---|---|---|---|")
    for kind, rates in found.items():
        row = [statistics.median(each) for each in (rates.first_ms, rates.calls_s, rates.at_once_s, rates.mb_s)]
        print(f"| {kind} | {row[0]:.1f} | {row[1]:.0f} | {row[2]:.0f} | {row[3]:.0f} |")
    for kind, (ended_s, refused_s) in gone.items():
        print(
            f"\nrevoked, {kind}: its stream ended after {ended_s:.1f} s, a new call was refused {refused_s:.1f} s after"
        )


if __name__ == "__main__":
    main()
