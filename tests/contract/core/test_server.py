"""A server's life as its peers see it: health, reflection, drain, and which addresses it takes."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry import trace

from meshrl.client import RolloutClient
from meshrl.core.config.base import ConfigError
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.intercept import CallInterceptor
from meshrl.core.rpc.serve import GrpcServer
from meshrl.wire.errors import MeshError, Reason

BUF = Path(__file__).parents[3] / ".tools/buf/node_modules/.bin/buf"
SERVICE = "meshrl.v1.RolloutService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status_of(channel, service):
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60.0)).status


@pytest.fixture
async def channel(mesh) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        yield channel


async def test_health_is_told_per_service_and_for_the_server(mesh, channel):
    for service in (SERVICE, "meshrl.v1.TrainerService", ""):
        assert await status_of(channel, service) == SERVING
    mesh.server.set_not_serving()
    for service in (SERVICE, "meshrl.v1.TrainerService", ""):
        assert await status_of(channel, service) == NOT_SERVING


async def test_health_of_a_service_that_is_not_hosted_is_not_found(channel):
    with pytest.raises(grpc.aio.AioRpcError) as seen:
        await status_of(channel, "meshrl.v1.WeightSync")
    assert seen.value.code() is grpc.StatusCode.NOT_FOUND


async def test_every_watcher_of_health_is_told_of_each_change(mesh, channel):
    stub = health_pb2_grpc.HealthStub(channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60.0) for _ in range(2)]
    assert [(await watch.read()).status for watch in watches] == [SERVING, SERVING]
    watches[0].cancel()
    mesh.server.set_not_serving()
    assert (await watches[1].read()).status == NOT_SERVING
    mesh.server.set_serving()
    assert (await watches[1].read()).status == SERVING
    watches[1].cancel()


async def test_a_server_is_not_serving_before_it_says_so(make_mesh):
    mesh = await make_mesh()
    mesh.server.set_not_serving()
    async with RolloutClient(mesh.address) as client:
        for wait_s in (0.3, 3.0, 30.0):  # a busy machine answers nobody for a while
            with pytest.raises(MeshError, match=f"was not serving within {wait_s:g} s: ") as seen:
                await client.wait_until_serving(wait_s)
            if str(seen.value).endswith("its health says NOT_SERVING"):
                break
        assert str(seen.value).endswith("its health says NOT_SERVING")
        asyncio.get_running_loop().call_later(0.1, mesh.server.set_serving)
        await client.wait_until_serving(60.0)
    await mesh.server.drain(0.0)


async def test_a_server_that_is_away_for_long_is_looked_for_several_times_a_second():
    """gRPC waits between two attempts to connect, and a server that comes is not found before the next of them."""
    tried: list[float] = []
    enough = asyncio.Event()

    async def hang_up(reader, writer):
        tried.append(time.monotonic())
        writer.close()
        if len(tried) == 11:
            enough.set()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as nobody:
        port = nobody.sockets[0].getsockname()[1]
        async with RolloutClient(f"127.0.0.1:{port}") as client:
            looking = asyncio.create_task(client.wait_until_serving(60.0))
            await asyncio.wait_for(enough.wait(), 60.0)
            looking.cancel()
    waits = [after - before for before, after in pairwise(tried)]
    assert min(waits[-4:]) < 1.0, waits  # the shortest: a busy machine makes waits longer, never shorter


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_and_describes_them(channel, version):
    reflect = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def questions():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        for symbol in (SERVICE, "google.rpc.BadRequest", f"grpc.reflection.{version}.ServerReflection"):
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)

    listed, *described = [answer async for answer in reflect(questions(), timeout=60.0)]
    assert {service.name for service in listed.list_services_response.service} == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        SERVICE,
        "meshrl.v1.TrainerService",
    }
    packages = []
    for answer in described:
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in answer.file_descriptor_response.file_descriptor_proto
        ]
        packages.append({file.package for file in files} - {"google.protobuf"})
    assert packages == [{"meshrl.v1"}, {"google.rpc"}, {f"grpc.reflection.{version}"}]


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl_prints_an_error_with_its_details(mesh, protocol):
    """buf prints each detail by its type and bytes, whatever is reflected: it resolves no types for errors."""

    async def refuses(request, context):
        raise MeshError(Reason.OVERLOADED, "all slots are taken", retry_after_s=2.0)

    mesh.script.on["GetRolloutStatus"] = refuses
    url = f"http://{mesh.address}/{SERVICE}/GetRolloutStatus"
    flags = ("--http2-prior-knowledge", "--protocol", "grpc", "--reflect-protocol", protocol, "-d", "{}")
    buf = await asyncio.create_subprocess_exec(BUF, "curl", *flags, url, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(buf.communicate(), 60.0)
    error = json.loads(said)
    assert (error["code"], error["message"]) == ("resource_exhausted", "all slots are taken")
    details = {detail["type"]: base64.b64decode(detail["value"] + "==") for detail in error["details"]}
    assert error_details_pb2.ErrorInfo.FromString(details["google.rpc.ErrorInfo"]).reason == "OVERLOADED"
    assert error_details_pb2.RetryInfo.FromString(details["google.rpc.RetryInfo"]).retry_delay.seconds == 2


async def test_a_drain_finishes_what_is_in_flight_and_refuses_the_rest(make_mesh, answers):
    mesh = await make_mesh()
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def call(request, context):
        begun.set()
        await may_end.wait()
        return answers["GetRolloutStatus"]

    mesh.script.on["GetRolloutStatus"] = call
    async with RolloutClient(mesh.address) as client, grpc.aio.insecure_channel(mesh.address) as channel:
        running = asyncio.create_task(client.get_status())
        await asyncio.wait_for(begun.wait(), 60.0)
        drain = asyncio.create_task(mesh.server.drain(60.0))
        await asyncio.sleep(0)
        assert await status_of(channel, SERVICE) == NOT_SERVING
        with pytest.raises(MeshError) as refused:
            await client.get_status()
        assert refused.value.reason is Reason.DRAINING
        may_end.set()
        assert (await asyncio.wait_for(running, 60.0)).running == 3
        await asyncio.wait_for(drain, 60.0)
        assert mesh.script.calls == ["GetRolloutStatus"]
        with pytest.raises(MeshError) as gone:
            await client.get_status()
        assert gone.value.reason is Reason.UNREACHABLE


async def test_a_call_is_in_service_until_grpc_has_its_answer():
    """A servicer has returned before gRPC sends what it returned; a drain that did not wait for that would lose it."""
    calls, seen = CallInterceptor(trace.NoOpTracer()), []

    async def call(request, context):
        return b"answer"

    def serialized(answer: bytes) -> bytes:
        seen.append(calls.in_flight)
        return answer

    handler = grpc.unary_unary_rpc_method_handler(call, response_serializer=serialized)
    server = grpc.aio.server(interceptors=[calls])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("meshrl.v1.Answering", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/meshrl.v1.Answering/Call")(b"", timeout=60.0) == b"answer"
    assert seen == [1]
    assert await calls.wait_idle(60.0)
    await server.stop(None)


async def test_a_port_in_use_is_an_error_that_says_what_to_change(mesh):
    taken = GrpcServer(ServerConfig(port=mesh.port))
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+.*set another server\.port"):
        await taken.start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com"])
async def test_a_bind_that_others_reach_is_refused_without_tls(host):
    with pytest.raises(ConfigError, match=r"there is no TLS; .*--server\.insecure"):
        GrpcServer(ServerConfig(host=host))


@pytest.mark.parametrize(("host", "insecure"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
async def test_loopback_and_allowed_binds_are_taken(host, insecure):
    server = GrpcServer(ServerConfig(host=host, port=0, insecure=insecure))
    assert await server.start() > 0
    await server.drain(0.0)
