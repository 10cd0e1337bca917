"""The WeightSync servicers of a hub and of a relay. The streams of chunks bypass protobuf (`wire.frames`)."""

# ruff: noqa: N802 (methods are named after the RPCs of the contract)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message
from loguru import logger

from meshrl.client.weights import EVERY_RUN
from meshrl.core.rpc.paging import page_of
from meshrl.core.rpc.watches import with_bookmarks
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.weights.coordinator.engine_groups import BroadcastRequest
from meshrl.weights.hub import Hub
from meshrl.weights.raw_server import RawServer
from meshrl.weights.relay import Relay
from meshrl.wire import convert, frames
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.manifest import artifact_id, digest
from meshrl.wire.repeated_requests import FirstAnswers
from meshrl.wire.types import (
    CONTRACT_VERSION,
    ActivationRequest,
    AgentRegistration,
    AgentReport,
    Chunk,
    capabilities,
)


def _ranges(request: pb.FetchRequest) -> list[tuple[int, int]]:
    return [(byte_range.offset, byte_range.length) for byte_range in request.ranges]


class RelayService(weights_pb2_grpc.WeightSyncServicer):
    """Fetch of a relay. Everything else is the hub's."""

    def __init__(self, relay: Relay, upstream: str) -> None:
        self._relay, self._upstream = relay, upstream

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for message in self._relay.fetch(request.artifact_id, _ranges(request), request.chunk_bytes):
            yield message

    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext) -> pb.RegisterResponse:
        raise self._elsewhere("weight_broadcast.address", ", and weight_broadcast.relays to this one")

    async def CreateVersion(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.CreateVersionResponse:
        raise self._elsewhere("weight_broadcast.address")

    def _elsewhere(self, key: str, more: str = "") -> MeshError:
        text = f"this is a relay of the hub at {self._upstream}, which only passes bytes on; set {key} to that{more}"
        return MeshError(Reason.NOT_SUPPORTED, text)


def _fields(request: Message) -> dict[str, Any]:
    fields = (field for field in request.DESCRIPTOR.fields if field.name != "request_id")
    values = ((field, getattr(request, field.name)) for field in fields)
    return {field.name: tuple(value) if field.is_repeated else value for field, value in values}


def _asked(
    ask: Callable[[Hub, Any], Awaitable[Any]], answer: Callable[[Any], Message]
) -> Callable[..., Awaitable[Message]]:
    async def call(self: WeightSyncService, request: Any, context: grpc.aio.ServicerContext) -> Message:
        # Requests without an id have no effect that lasts; the others are idempotent.
        content = type(request).__name__.encode() + request.SerializeToString(deterministic=True)
        self._requests.check(getattr(request, "request_id", ""), digest(content))
        return answer(await ask(self._hub, request))

    return call


class WeightSyncService(weights_pb2_grpc.WeightSyncServicer):
    """Every RPC of WeightSync, as specified in proto/meshrl/v1/weights.proto."""

    def __init__(
        self, hub: Hub, on_drained: Callable[[], None] = lambda: None, *, raw: RawServer | None = None
    ) -> None:
        """`on_drained` is called once a client's Drain has left no commit under way. `raw` has been started."""
        self._hub, self._on_drained, self._raw = hub, on_drained, raw
        self._requests: FirstAnswers[None] = FirstAnswers()

    SealVersion = _asked(
        lambda hub, request: hub.seal_version(**_fields(request)),
        lambda info: pb.SealVersionResponse(version=convert.to_proto(info)),
    )
    AbortVersion = _asked(
        lambda hub, request: hub.abort_version(**_fields(request)),
        lambda info: pb.AbortVersionResponse(version=convert.to_proto(info)),
    )
    ActivateVersion = _asked(
        lambda hub, request: hub.activate_version(convert.from_proto(ActivationRequest, request)),
        convert.to_proto,
    )
    CloseRun = _asked(
        lambda hub, request: hub.close_run(**_fields(request)),
        lambda _: pb.CloseRunResponse(),
    )
    OpenGroup = _asked(
        lambda hub, request: hub.open_group(BroadcastRequest(request_id=request.request_id, **_fields(request))),
        convert.to_proto,
    )
    SleepEngines = _asked(lambda hub, request: hub.sleep_engines(**_fields(request)), convert.to_proto)

    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext) -> pb.RegisterResponse:
        lease = await self._hub.register(convert.from_proto(AgentRegistration, request))
        answer: pb.RegisterResponse = convert.to_proto(
            lease, contract_version=CONTRACT_VERSION, capabilities=capabilities.HUB
        )
        return answer

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        async def reports() -> AsyncIterator[AgentReport]:
            async for message in request_iterator:
                yield convert.from_proto(AgentReport, message)

        async for command in self._hub.session(reports()):
            yield convert.agent_command_to_proto(command)

    async def CreateVersion(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.CreateVersionResponse:
        parts = aiter(request_iterator)
        first = await anext(parts, b"")
        header = frames.parse_upload(first) if first else None
        if not isinstance(header, pb.Manifest):
            raise invalid([FieldViolation("manifest", "must be the first message of the upload")], "the upload")
        lists: list[pb.ManifestPart] = []
        follows: pb.Manifest | pb.ManifestPart | Chunk | None = None
        while not header.tensors and follows is None and (message := await anext(parts, b"")):
            part = frames.parse_upload(message)
            if isinstance(part, pb.ManifestPart):
                lists.append(part)
            else:
                follows = part

        async def chunks() -> AsyncIterator[Chunk]:
            part = follows
            while part is not None or (message := await anext(parts, b"")):
                part = frames.parse_upload(message) if part is None else part
                if not isinstance(part, Chunk):
                    raise invalid([FieldViolation("chunk", "must follow the manifest")], "the upload")
                yield part
                part = None

        manifest = await asyncio.to_thread(convert.manifest_of, header, lists)
        staged = await self._hub.create_version(manifest, chunks())
        if self._raw is not None:
            staged = replace(staged, raw_port=self._raw.port)
        answer: pb.CreateVersionResponse = convert.to_proto(staged)
        return answer

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        coordinator, run_id = self._hub.coordinator, "" if request.run_id == EVERY_RUN else request.run_id
        if not request.run_id and coordinator.lines:
            run_id = coordinator.line("").run_id
        after = coordinator.revision if request.from_now else request.after_revision
        events = (convert.to_proto(event) async for event in self._hub.watch_versions(run_id, after))

        def bookmark(revision: int) -> pb.WatchVersionsResponse:
            return pb.WatchVersionsResponse(revision=revision, bookmark=True)

        async with aclosing(
            with_bookmarks(events, bookmark, sent=after, at_once=request.from_now, quiet_s=request.bookmark_s)
        ) as messages:
            async for message in messages:
                yield message

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetManifestResponse:
        version = request.version if request.HasField("version") else None
        found = await self._hub.find_version(request.run_id, version, request.artifact_id, request.held_root)
        if request.gzip_ok:
            context.set_compression(grpc.Compression.Gzip)
            await context.send_initial_metadata(())  # else grpc.aio forgets the compression
        raw_port = 0 if self._raw is None else self._raw.port
        if request.view != pb.MANIFEST_VIEW_HEADER:
            return pb.GetManifestResponse(
                raw_port=raw_port,
                manifest=convert.to_proto(found.manifest),
                artifact_id=found.artifact_id,
                steps=map(convert.to_proto, found.steps),
            )
        return pb.GetManifestResponse(
            raw_port=raw_port,
            manifest=convert.manifest_header(found.manifest),
            artifact_id=found.artifact_id,
            steps=map(convert.manifest_header, found.steps),
            size=await asyncio.to_thread(convert.manifest_size, found.manifest),
            step_artifact_ids=await asyncio.to_thread(lambda: [artifact_id(step) for step in found.steps]),
        )

    async def FetchManifest(
        self, request: pb.FetchManifestRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchManifestResponse]:
        manifest = (await self._hub.find_version("", None, request.artifact_id)).manifest
        size = await asyncio.to_thread(convert.manifest_size, manifest)
        yield pb.FetchManifestResponse(header=convert.manifest_header(manifest), size=size)
        parts = convert.manifest_parts(manifest)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            yield pb.FetchManifestResponse(part=part)

    async def GetCompiled(
        self, request: pb.GetCompiledRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetCompiledResponse:
        archive_digest, archive = await asyncio.to_thread(self._hub.compiled.get, request.key)
        return pb.GetCompiledResponse(digest=archive_digest, archive=b"" if request.digest_only else archive)

    async def KeepCompiled(
        self, request: pb.KeepCompiledRequest, context: grpc.aio.ServicerContext
    ) -> pb.KeepCompiledResponse:
        await asyncio.to_thread(self._hub.compiled.keep, request.key, request.digest, request.archive)
        return pb.KeepCompiledResponse()

    async def Drain(
        self, request: pb.WeightSyncDrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.WeightSyncDrainResponse:
        logger.info("draining: {}", request.message or "a client asked for it")
        await self._hub.drain(request.deadline_s if request.HasField("deadline_s") else None)
        self._on_drained()
        return pb.WeightSyncDrainResponse()

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for message in self._hub.fetch(request.artifact_id, _ranges(request), request.chunk_bytes):
            yield message

    async def ListEngines(
        self, request: pb.ListEnginesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnginesResponse:
        engines = self._hub.list_engines(request.engine_pool)
        page, token = page_of(request, engines, lambda engine: engine.engine_id)
        epochs = self._hub.coordinator.epochs
        return pb.ListEnginesResponse(
            engines=map(convert.to_proto, page),
            next_page_token=token,
            epoch=max(epochs.values(), default=0) if len(epochs) < 2 else 0,
            run_epochs=epochs,
            contract_version=CONTRACT_VERSION,
            capabilities=capabilities.HUB,
        )
