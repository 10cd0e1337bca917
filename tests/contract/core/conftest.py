"""A real server on loopback with a scripted RolloutService and TrainerService, and clients of it."""
# ruff: noqa: N802  # methods are named by the contract

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from access_matrix import member
from meshrl.client import ChannelOptions, RolloutClient, TrainerClient
from meshrl.client.authority import Authority
from meshrl.client.trust import Role
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.enrollment import SERVICE, EnrollmentServicer, open_entry
from meshrl.core.rpc.serve import GrpcServer
from meshrl.v1 import identity_pb2_grpc
from meshrl.v1 import rollout_pb2 as rollout_pb
from meshrl.v1 import rollout_pb2_grpc as rollout_grpc
from meshrl.v1 import trainer_pb2 as trainer_pb
from meshrl.v1 import trainer_pb2_grpc as trainer_grpc


class Script(rollout_grpc.RolloutServiceServicer, trainer_grpc.TrainerServiceServicer):
    """A servicer whose methods are what a test puts in: `script.on["GetTrainer"] = handler`."""

    def __init__(self) -> None:
        self.on: dict[str, Any] = {}
        self.calls: list[str] = []

    async def _unary(self, name, request, context):
        self.calls.append(name)
        return await self.on[name](request, context)

    async def ListEnvironments(self, request, context):
        return await self._unary("ListEnvironments", request, context)

    async def GetRolloutStatus(self, request, context):
        return await self._unary("GetRolloutStatus", request, context)

    async def CancelRollouts(self, request, context):
        if "CancelRollouts" not in self.on:  # as in a server that does not offer it
            return await super().CancelRollouts(request, context)
        return await self._unary("CancelRollouts", request, context)

    async def GetTrainer(self, request, context):
        return await self._unary("GetTrainer", request, context)

    async def SubmitBatch(self, request_iterator, context):
        return await self._unary("SubmitBatch", request_iterator, context)

    async def RunRollouts(self, request, context):
        self.calls.append("RunRollouts")
        async for message in self.on["RunRollouts"](request, context):
            yield message

    async def WatchSteps(self, request, context):
        self.calls.append("WatchSteps")
        async for message in self.on["WatchSteps"](request, context):
            yield message


class Mesh:
    """The server under test and the way to it."""

    def __init__(self, server: GrpcServer, script: Script) -> None:
        self.server, self.script, self.port = server, script, 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


async def start_mesh(port: int = 0, **options: Any) -> Mesh:
    config = ServerConfig(port=port)
    script = Script()
    mesh = Mesh(GrpcServer(config, **options), script)
    mesh.server.add("meshrl.v1.RolloutService", rollout_grpc.add_RolloutServiceServicer_to_server, script)
    mesh.server.add("meshrl.v1.TrainerService", trainer_grpc.add_TrainerServiceServicer_to_server, script)
    mesh.port = await mesh.server.start()
    mesh.server.set_serving()
    return mesh


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    mesh = await start_mesh()
    yield mesh
    await mesh.server.drain(0.0)


@pytest.fixture
async def make_mesh() -> AsyncIterator[Callable[..., Awaitable[Mesh]]]:
    """Starts meshes of a test's own. Those that the test has not drained, as when it failed, are drained after it: a
    server that is left to the garbage collector fails other tests."""
    started: list[Mesh] = []

    async def start(port: int = 0, **options: Any) -> Mesh:
        started.append(await start_mesh(port, **options))
        return started[-1]

    yield start
    for mesh in started:
        await mesh.server.drain(0.0)


@pytest.fixture
async def rollout_client(mesh: Mesh) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(mesh.address, ChannelOptions(unary_deadline_s=60.0, retry_backoff_s=0.02)) as client:
        yield client


@pytest.fixture
async def trainer_client(mesh: Mesh) -> AsyncIterator[TrainerClient]:
    async with TrainerClient(mesh.address, ChannelOptions(unary_deadline_s=60.0, reconnect_s=3.0)) as client:
        yield client


@pytest.fixture
def answers() -> dict[str, Any]:
    """The smallest valid answers, by method."""
    return {
        "ListEnvironments": rollout_pb.ListEnvironmentsResponse(contract_version="1.0"),
        "GetRolloutStatus": rollout_pb.GetRolloutStatusResponse(running=3),
        "GetTrainer": trainer_pb.GetTrainerResponse(contract_version="1.0", seq_len=8),
    }


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("run") / "credentials", "main")


@pytest.fixture
async def entry(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Where hosts join the run: the address of a hub that also renews."""
    for variable, value in member(authority, Role.HUB, "entry").variables().items():
        monkeypatch.setenv(variable, value)
    servicer = EnrollmentServicer(authority)
    main = GrpcServer(ServerConfig())
    main.add(SERVICE, identity_pb2_grpc.add_EnrollmentServiceServicer_to_server, servicer)
    servicer.renewal_port = await main.start()
    server, port = await open_entry(servicer, "127.0.0.1", 0)
    yield f"127.0.0.1:{port}"
    await server.drain(0.0)
    await main.drain(0.0)
