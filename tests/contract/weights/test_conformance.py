"""`meshrl conformance` on a hub: ours keeps every rule, and servers that break one are named by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import google_crc32c
import pytest

from conformance_kit import verdict
from grpc_servers import served
from meshrl.client import WeightSyncClient
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.service import WeightSyncService
from meshrl.wire import frames
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id
from meshrl.wire.types import Chunk, Transport
from meshrl_conformance import weights
from weight_mesh import MemoryEngine, Mesh, make_state


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "QUIET_S", 0.2)


async def test_our_hub_keeps_every_rule_of_publishing(mesh: Mesh) -> None:
    broken, unchecked = await verdict(f"127.0.0.1:{mesh.port}", "weights", full=True)
    assert broken == {}
    assert unchecked == dict.fromkeys(("weights.artifact", "weights.manifest"), "no version is committed yet")


async def test_our_hub_keeps_every_rule_and_the_safe_checks_change_nothing(mesh: Mesh, engine: MemoryEngine) -> None:
    await commit_version(mesh, engine)
    broken, unchecked = await verdict(f"127.0.0.1:{mesh.port}", "weights")
    assert broken == {}
    assert set(unchecked) == {"contract.version"}
    assert mesh.hub.coordinator.line("").epoch == 1
    assert [one.engine_id for one in mesh.hub.list_engines("")] == ["e0"]


async def commit_version(mesh: Mesh, engine: MemoryEngine) -> None:
    """Version 0 is published, and served by an engine."""
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    publisher = mesh.publisher(Transport.STREAM)
    await publisher.publish(0, make_state(0))
    await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=60.0)
    await publisher.close()


class NamesItOtherwise(WeightSyncService):
    """Its artifact ids are not those of the manifests."""

    async def GetManifest(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        answer = await super().GetManifest(request, context)
        answer.artifact_id = "0" * 64
        return answer


class SumsNothing(WeightSyncService):
    """Its chunks have no checksum."""

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        async for message in super().Fetch(request, context):
            chunk = frames.parse_fetch(message)
            yield pb.FetchResponse(chunk=pb.Chunk(offset=chunk.offset, data=bytes(chunk.data)))


class TakesDamage(WeightSyncService):
    """It does not look at the checksums of the chunks that come."""

    async def CreateVersion(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        async def mended() -> AsyncIterator[bytes]:
            async for message in request_iterator:
                part = frames.parse_upload(message)
                if isinstance(part, Chunk):
                    data = bytes(part.data)
                    message = frames.frame_upload_chunk(
                        Chunk(offset=part.offset, data=data, crc32c=google_crc32c.value(data))
                    )
                yield message

        return await super().CreateVersion(mended(), context)


class ForgetsParts(WeightSyncService):
    """It sends the header of a manifest, and no more."""

    async def FetchManifest(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        async for piece in super().FetchManifest(request, context):
            if piece.HasField("header"):
                yield piece


class OneMessageIsTooSmall(WeightSyncService):
    """Its whole manifests pass the limit of a message."""

    async def GetManifest(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if request.view != pb.MANIFEST_VIEW_HEADER:
            raise MeshError(Reason.MESSAGE_TOO_LARGE, "Sent message larger than max")
        return await super().GetManifest(request, context)


async def test_a_manifest_that_is_too_large_for_a_message_comes_in_parts(mesh: Mesh, engine: MemoryEngine) -> None:
    await commit_version(mesh, engine)
    async with (
        served(frames.SERVICE, frames.add_weight_sync, OneMessageIsTooSmall(mesh.hub)) as address,
        WeightSyncClient(address) as client,
    ):
        manifest, artifact = await client.get_manifest()
    assert artifact == artifact_id(manifest)
    assert (manifest.version, bool(manifest.tensors)) == (0, True)


class BeginsLate(WeightSyncService):
    """It takes its time before it sends what was, as one far away or on a busy machine."""

    async def WatchVersions(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        await asyncio.sleep(1.5)
        async for event in super().WatchVersions(request, context):
            yield event


async def test_a_slow_hub_breaks_no_rule(mesh: Mesh, engine: MemoryEngine) -> None:
    await commit_version(mesh, engine)
    async with served(frames.SERVICE, frames.add_weight_sync, BeginsLate(mesh.hub)) as address:
        broken, _ = await verdict(address, "weights")
    assert broken == {}


class GoesByNumbers(WeightSyncService):
    """It commits whatever has the number of a version."""

    async def ActivateVersion(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        request.ClearField("artifact_id")
        request.ClearField("epoch")
        return await super().ActivateVersion(request, context)


class NeverMarks(WeightSyncService):
    """From now on it sends what was."""

    async def WatchVersions(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        request.ClearField("from_now")
        async for event in super().WatchVersions(request, context):
            event.bookmark = False
            yield event


class BreaksMuch(SumsNothing, TakesDamage, ForgetsParts, GoesByNumbers, NeverMarks):
    """Each of these breaks one rule, of publishing or of watching."""


MUCH = {"weights.fetch", "weights.checksum", "weights.parts", "weights.content", "weights.bookmarks"}


@pytest.mark.parametrize(("servicer", "rules"), [(NamesItOtherwise, {"weights.artifact"}), (BreaksMuch, MUCH)])
async def test_a_hub_that_breaks_rules_is_named_by_them(
    mesh: Mesh, engine: MemoryEngine, servicer: type[WeightSyncService], rules: set[str]
) -> None:
    publishes = servicer is BreaksMuch
    if not publishes:
        await commit_version(mesh, engine)
    async with served(frames.SERVICE, frames.add_weight_sync, servicer(mesh.hub)) as address:
        broken, _ = await verdict(address, "weights", full=publishes)
    assert set(broken) == rules, broken
