"""Chunks, early answers and sessions of WeightSync through a real channel, with raw frames on both sides."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from meshrl.client import WeightSyncClient
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.wire import convert, frames
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentReport, AgentState, Chunk, DrainAgent, Manifest, StagedVersion, Transport

MANIFEST = Manifest(
    run_id="r",
    epoch=1,
    version=1,
    transport=Transport.STREAM,
    result_root=b"",
    layout_signature=b"",
    tensors=(),
    chunks=(),
)
CHUNKS = [Chunk(offset=offset, data=bytes([offset % 251]) * 70_000, crc32c=offset) for offset in (0, 70_000, 140_000)]
# ruff: noqa: N802  # methods are named by the contract


class Hub(weights_pb2_grpc.WeightSyncServicer):
    """Keeps what is uploaded; answers as its fields say."""

    def __init__(self):
        self.uploaded, self.reports, self.refusal, self.answer_after = [], [], None, None
        self.plain_messages = False

    async def CreateVersion(self, request_iterator, context):
        async for message in request_iterator:
            self.uploaded.append(frames.parse_upload(message))
            if self.refusal is not None:
                raise self.refusal
            if len(self.uploaded) == self.answer_after:
                break
        return convert.to_proto(StagedVersion(artifact_id="a", missing_offsets=(), max_chunk_bytes=9))

    async def Fetch(self, request, context):
        for chunk in CHUNKS:
            if self.plain_messages:
                yield pb.FetchResponse(chunk=convert.to_proto(chunk))
            else:
                yield frames.frame_fetch_chunk(chunk)

    async def Session(self, request_iterator, context):
        yield pb.SessionResponse()  # a command of a newer hub
        async for message in request_iterator:
            self.reports.append(convert.from_proto(AgentReport, message))
            if self.refusal is not None:
                raise self.refusal
            yield convert.agent_command_to_proto(DrainAgent())


@pytest.fixture
async def hub() -> AsyncIterator[SimpleNamespace]:
    server, servicer = GrpcServer(ServerConfig()), Hub()
    server.add(frames.SERVICE, frames.add_weight_sync, servicer)
    port = await server.start()
    server.set_serving()
    async with WeightSyncClient(f"127.0.0.1:{port}") as client:
        yield SimpleNamespace(servicer=servicer, client=client, server=server)
    await server.drain(0.0)


async def sent(chunks):
    for chunk in chunks:
        yield chunk


async def end_of(stream):
    async for _ in stream:
        pass


def content(chunks):
    return [(chunk.offset, bytes(chunk.data), chunk.crc32c) for chunk in chunks]


async def test_an_upload_arrives_as_it_was_sent(hub):
    staged = await hub.client.create_version(MANIFEST, sent(CHUNKS))
    assert staged == StagedVersion(artifact_id="a", missing_offsets=(), max_chunk_bytes=9)
    manifest, *chunks = hub.servicer.uploaded
    assert convert.from_proto(Manifest, manifest) == MANIFEST
    assert content(chunks) == content(CHUNKS)


async def test_a_version_of_files_has_no_chunks(hub):
    await hub.client.create_version(MANIFEST)
    assert len(hub.servicer.uploaded) == 1


@pytest.mark.parametrize("plain_messages", [False, True])
async def test_fetched_chunks_are_those_of_the_hub(hub, plain_messages):
    hub.servicer.plain_messages = plain_messages
    async with aclosing(hub.client.fetch("a" * 64, ranges=[(0, 10)])) as stream:
        assert content([chunk async for chunk in stream]) == content(CHUNKS)


async def test_an_early_answer_ends_an_upload_that_would_go_on(hub):
    hub.servicer.answer_after = 3
    closed = asyncio.Event()

    async def endless():
        try:
            while True:
                yield CHUNKS[0]
        finally:
            closed.set()

    staged = await asyncio.wait_for(hub.client.create_version(MANIFEST, endless()), 60.0)
    assert staged.artifact_id == "a"
    assert len(hub.servicer.uploaded) == 3
    await asyncio.wait_for(closed.wait(), 60.0)


async def test_a_refusal_ends_an_upload_that_would_go_on(hub):
    hub.servicer.refusal = MeshError(Reason.STALE_EPOCH, "epoch 1 is over; 2 has begun")

    async def endless():
        while True:
            yield CHUNKS[0]

    for _ in range(10):
        with pytest.raises(MeshError, match="STALE_EPOCH: epoch 1 is over"):
            await asyncio.wait_for(hub.client.create_version(MANIFEST, endless()), 60.0)


async def test_an_upload_whose_source_fails_fails_with_its_error(hub):
    async def broken():
        yield CHUNKS[0]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        await asyncio.wait_for(hub.client.create_version(MANIFEST, broken()), 60.0)


async def test_a_session_whose_reports_fail_fails_with_their_error(hub):
    async def broken():
        yield AgentReport(lease_id="l", state=AgentState.READY)
        raise OSError("engine gone")

    with pytest.raises(OSError, match="engine gone"):
        await asyncio.wait_for(end_of(hub.client.session(broken())), 60.0)


async def test_a_session_carries_reports_up_and_known_commands_down(hub):
    reports = [AgentReport(lease_id="l", state=AgentState.READY, serving_version=version) for version in (0, 1)]
    async with aclosing(hub.client.session(sent(reports))) as commands:
        assert [command async for command in commands] == [DrainAgent(), DrainAgent()]
    assert hub.servicer.reports == reports


async def test_a_session_ends_with_the_hubs_error(hub):
    hub.servicer.refusal = MeshError(Reason.LEASE_EXPIRED)

    async def reports():
        while True:
            yield AgentReport(lease_id="l", state=AgentState.READY)
            await asyncio.sleep(0.05)

    async with aclosing(hub.client.session(reports())) as commands:
        with pytest.raises(MeshError) as seen:
            await asyncio.wait_for(anext(commands), 60.0)
    assert seen.value.reason is Reason.LEASE_EXPIRED


async def test_a_session_whose_hub_stops_is_lost_and_not_a_defect(hub):
    async def reports():
        while True:
            yield AgentReport(lease_id="l", state=AgentState.READY)
            await asyncio.sleep(0.01)

    async with aclosing(hub.client.session(reports())) as commands:
        assert await asyncio.wait_for(anext(commands), 60.0) == DrainAgent()
        await hub.server.drain(0.0)
        with pytest.raises(MeshError) as seen:
            await asyncio.wait_for(end_of(commands), 60.0)
    assert seen.value.reason in (Reason.UNREACHABLE, Reason.DRAINING)
