"""Client of WeightSync, for publishers, agents and the orchestrator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from opentelemetry.trace import Tracer

from meshrl.client.channel import ChannelOptions, ServiceClient
from meshrl.client.credentials import INSECURE
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.wire import convert, frames
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import digest
from meshrl.wire.types import (
    CONTRACT_VERSION,
    Activation,
    ActivationPolicy,
    ActivationRequest,
    AgentCommand,
    AgentRegistration,
    AgentReport,
    Chunk,
    EngineInfo,
    FoundVersion,
    Lease,
    Manifest,
    OpenedGroup,
    SleepOutcome,
    StagedVersion,
    VersionEvent,
    VersionInfo,
    capabilities,
)
from meshrl.wire.validate import validate_contract_version

_T = TypeVar("_T")


@asynccontextmanager
async def while_moving(stall_s: float, what: str) -> AsyncIterator[Callable[[], None]]:
    """Raises MeshError UNREACHABLE in its block when the function that it yields was not called for `stall_s`."""
    loop = asyncio.get_running_loop()

    def moved() -> None:
        with suppress(RuntimeError):  # it is being given up, or over: another task may hear of that later
            timeout.reschedule(loop.time() + stall_s)

    try:
        async with asyncio.timeout(stall_s) as timeout:
            yield moved
    except TimeoutError as error:
        raise MeshError(Reason.UNREACHABLE, f"nothing of {what} moved for {stall_s:g} s") from error


async def moving(messages: AsyncGenerator[_T, None], stall_s: float, what: str) -> AsyncGenerator[_T, None]:
    """Yields `messages`. Raises MeshError UNREACHABLE when none came for `stall_s`."""
    while True:
        try:
            async with while_moving(stall_s, what):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        yield message


EVERY_RUN = "-"


class WeightSyncClient(ServiceClient):
    """Every method raises MeshError, and nothing else, when its call fails."""

    service = frames.SERVICE
    server_role = "hub"
    idempotent_methods = (
        "Register",
        "SealVersion",
        "AbortVersion",
        "ActivateVersion",
        "GetManifest",
        "GetCompiled",
        "KeepCompiled",
        "ListEngines",
        "OpenGroup",
        "SleepEngines",
    )

    def __init__(
        self,
        address: str,
        options: ChannelOptions | None = None,
        *,
        tracer: Tracer | None = None,
        of_relay: bool = False,
    ) -> None:
        """of_relay: `address` is a relay's, whose certificate names that role."""
        if of_relay:
            self.server_role = "relay"
        super().__init__(address, options, tracer=tracer)
        self.capabilities: frozenset[str] | None = None
        """Of the hub, once it has answered a first call."""
        self.raw_port = 0
        """For fetches over HTTP, by the hub's last answer; 0 is none. Credentials are never left out for it."""
        self._stub = weights_pb2_grpc.WeightSyncStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._create_version = self._channel.stream_unary(
            frames.CREATE_VERSION,
            request_serializer=frames.serialize,
            response_deserializer=pb.CreateVersionResponse.FromString,
        )
        self._fetch = self._channel.unary_stream(
            frames.FETCH,
            request_serializer=pb.FetchRequest.SerializeToString,
            response_deserializer=frames.pass_through,
        )

    async def register(self, registration: AgentRegistration) -> Lease:
        """Raises CONTRACT_MISMATCH for a hub of another major version."""
        request = convert.to_proto(registration, contract_version=CONTRACT_VERSION)
        response = await self._unary(self._stub.Register, "Register", request)
        validate_contract_version(response.contract_version)
        self.capabilities = frozenset(response.capabilities)
        return convert.from_proto(Lease, response)

    async def session(self, reports: AsyncIterator[AgentReport]) -> AsyncGenerator[AgentCommand, None]:
        """Sends `reports` and yields the hub's commands until either side ends; unknown commands are passed over.

        Raises UNREACHABLE for a broken line, LEASE_EXPIRED to register again."""

        async def upward() -> AsyncGenerator[pb.SessionRequest, None]:
            async for report in reports:
                yield convert.to_proto(report)

        async with aclosing(self._stream(self._stub.Session, "Session", upward(), None)) as stream:
            async for response in stream:
                command = convert.agent_command_from_proto(response)
                if command is not None:
                    yield command

    async def create_version(
        self, manifest: Manifest, chunks: AsyncIterable[Chunk | bytes] | None = None, *, stall_s: float | None = None
    ) -> StagedVersion:
        """Stages a version: its manifest, then `chunks` in any order, framed (`frames.frame_upload_chunk`) or not.

        Raises UNREACHABLE when no chunk left for `stall_s`, MESSAGE_TOO_LARGE for a manifest that the hub does not take
        in parts."""
        whole = convert.to_proto(manifest)
        in_parts = whole.ByteSize() > self.options.max_message_bytes // 2
        if in_parts and self.capabilities is not None and capabilities.MANIFEST_PARTS not in self.capabilities:
            text = f"the manifest of version {manifest.version} has {whole.ByteSize()} bytes, and the hub lacks the"
            raise MeshError(
                Reason.MESSAGE_TOO_LARGE,
                f"{text} capability {capabilities.MANIFEST_PARTS}; start it from this release",
            )
        limit_s = self.options.transfer_stall_s if stall_s is None else stall_s
        async with while_moving(limit_s, f"the upload of version {manifest.version}") as moves:

            async def upload() -> AsyncGenerator[pb.CreateVersionRequest | bytes, None]:
                if not in_parts:
                    yield pb.CreateVersionRequest(manifest=whole)
                else:
                    yield pb.CreateVersionRequest(manifest=convert.manifest_header(manifest))
                    for part in convert.manifest_parts(manifest):
                        yield pb.CreateVersionRequest(manifest_part=part)
                if chunks is not None:
                    async for chunk in chunks:
                        yield chunk if isinstance(chunk, bytes) else frames.frame_upload_chunk(chunk)
                        moves()

            response = await self._upload(self._create_version, "CreateVersion", upload(), None)
        staged = convert.from_proto(StagedVersion, response)
        return replace(staged, raw_port=self._plain(staged.raw_port))

    def _plain(self, port: int) -> int:
        return port if self._credentials is INSECURE else 0

    async def seal_version(
        self,
        *,
        run_id: str,
        epoch: int,
        version: int,
        artifact_id: str,
        traceparent: str = "",
        deadline_s: float | None = None,
    ) -> VersionInfo:
        """Declares a staged version complete; a repeated call joins the first. The hub may have to hash all of it.

        Raises CHUNKS_MISSING, DIGEST_MISMATCH."""
        request = pb.SealVersionRequest(
            request_id=str(uuid.uuid4()),
            run_id=run_id,
            epoch=epoch,
            version=version,
            artifact_id=artifact_id,
            traceparent=traceparent,
        )
        response = await self._unary(self._stub.SealVersion, "SealVersion", request, deadline_s)
        return convert.version_info_from_proto(response.version)

    async def abort_version(self, *, run_id: str, epoch: int, version: int, message: str) -> VersionInfo:
        request = pb.AbortVersionRequest(
            request_id=str(uuid.uuid4()), run_id=run_id, epoch=epoch, version=version, message=message
        )
        response = await self._unary(self._stub.AbortVersion, "AbortVersion", request)
        return convert.version_info_from_proto(response.version)

    async def close_run(self, run_id: str, epoch: int) -> None:
        """Ends a run at the hub: engines let go of its versions."""
        request = pb.CloseRunRequest(request_id=str(uuid.uuid4()), run_id=run_id, epoch=epoch)
        await self._unary(self._stub.CloseRun, "CloseRun", request)

    async def activate_version(
        self,
        *,
        run_id: str,
        version: int,
        policy: ActivationPolicy = ActivationPolicy.ROLLING,
        min_ready: int = 0,
        prepare_deadline_s: float,
        artifact_id: str = "",
    ) -> Activation:
        """Returns when `min_ready` engines (0: all) serve a sealed version.

        Raises ENGINES_NOT_READY when fewer had prepared it after `prepare_deadline_s`, VERSION_CONFLICT for another
        content than `artifact_id`, since epochs share version numbers.
        """
        asked = ActivationRequest(
            run_id=run_id,
            version=version,
            policy=policy,
            min_ready=min_ready,
            prepare_deadline_s=prepare_deadline_s,
            artifact_id=artifact_id,
        )
        request = convert.to_proto(asked, request_id=str(uuid.uuid4()))
        deadline_s = prepare_deadline_s + self.options.unary_deadline_s
        response = await self._unary(self._stub.ActivateVersion, "ActivateVersion", request, deadline_s)
        return convert.from_proto(Activation, response)

    def watch_versions(self, run_id: str = EVERY_RUN, after_revision: int = 0) -> AsyncGenerator[VersionEvent, None]:
        """Changes of version states after a revision; reconnects and resumes for up to `reconnect_s`."""
        return self._watch(
            self._stub.WatchVersions,
            "WatchVersions",
            lambda revision: pb.WatchVersionsRequest(run_id=run_id, after_revision=revision),
            after_revision,
            convert.version_event_from_proto,
        )

    async def get_manifest(
        self, run_id: str = "", version: int | None = None, *, artifact_id: str = ""
    ) -> tuple[Manifest, str]:
        """(manifest, artifact_id) of a version, by default the newest committed one, or of an artifact."""
        found = await self.find_version(run_id, version, artifact_id=artifact_id)
        return found.manifest, found.artifact_id

    async def find_version(
        self, run_id: str = "", version: int | None = None, *, artifact_id: str = "", held_root: bytes = b""
    ) -> FoundVersion:
        """As `get_manifest`, with the steps that reach a delta from weights with the root `held_root`.

        A broadcast version has its copy as the only step, once that is at the hub.
        """
        request = pb.GetManifestRequest(
            run_id=run_id, version=version, artifact_id=artifact_id, held_root=held_root, gzip_ok=True
        )
        try:
            response = await self._unary(self._stub.GetManifest, "GetManifest", request)
        except MeshError as error:
            if error.reason is not Reason.MESSAGE_TOO_LARGE:
                raise
            request.view = pb.MANIFEST_VIEW_HEADER
            response = await self._unary(self._stub.GetManifest, "GetManifest", request)
        self.raw_port = self._plain(response.raw_port)
        if request.view == pb.MANIFEST_VIEW_HEADER:
            return FoundVersion(
                manifest=await self._manifest_in_parts(response.artifact_id),
                artifact_id=str(response.artifact_id),
                steps=tuple([await self._manifest_in_parts(step) for step in response.step_artifact_ids]),
            )
        return FoundVersion(
            manifest=convert.from_proto(Manifest, response.manifest, "manifest"),
            artifact_id=str(response.artifact_id),
            steps=tuple(convert.from_proto(Manifest, step, "manifest") for step in response.steps),
        )

    async def _manifest_in_parts(self, artifact_id: str) -> Manifest:
        request, limit_s = pb.FetchManifestRequest(artifact_id=artifact_id), self.options.transfer_stall_s
        header, parts = pb.Manifest(), []
        async with aclosing(self._stream(self._stub.FetchManifest, "FetchManifest", request, None)) as stream:
            async for message in moving(stream, limit_s, f"the manifest of artifact {artifact_id}"):
                if message.WhichOneof("piece") == "header":
                    header = message.header
                else:
                    parts.append(message.part)
        return await asyncio.to_thread(convert.manifest_of, header, parts)

    async def fetch(
        self,
        artifact_id: str,
        ranges: Sequence[tuple[int, int]] = (),
        chunk_bytes: int = 0,
        *,
        stall_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of (offset, length) ranges, or of everything; `data` is a view into the message.

        Raises UNREACHABLE when none came for `stall_s`."""
        request = pb.FetchRequest(
            artifact_id=artifact_id,
            ranges=[pb.ByteRange(offset=offset, length=length) for offset, length in ranges],
            chunk_bytes=chunk_bytes,
        )
        limit_s = self.options.transfer_stall_s if stall_s is None else stall_s
        async with aclosing(self._stream(self._fetch, "Fetch", request, None, with_span=True)) as stream:
            async for message in moving(stream, limit_s, f"artifact {artifact_id}"):
                yield frames.parse_fetch(message)

    async def get_compiled(self, key: str) -> bytes:
        """The archive of what an engine of the key compiled, empty without one. Raises DIGEST_MISMATCH."""
        response = await self._unary(self._stub.GetCompiled, "GetCompiled", pb.GetCompiledRequest(key=key))
        if response.digest and digest(response.archive) != response.digest:
            raise MeshError(Reason.DIGEST_MISMATCH, "the archive of what was compiled was damaged on its way")
        return bytes(response.archive)

    async def keep_compiled(self, key: str, pack: Callable[[], Awaitable[bytes]]) -> None:
        """Keeps the archive that `pack` makes at the hub, unless that has one of the key."""
        asked = pb.GetCompiledRequest(key=key, digest_only=True)
        if not (await self._unary(self._stub.GetCompiled, "GetCompiled", asked)).digest:
            archive = await pack()
            request = pb.KeepCompiledRequest(key=key, digest=digest(archive), archive=archive)
            await self._unary(self._stub.KeepCompiled, "KeepCompiled", request)

    async def open_group(
        self,
        *,
        run_id: str,
        epoch: int,
        store_address: str,
        backend: str,
        num_senders: int,
        engine_ids: Sequence[str] = (),
        without: Sequence[str] = (),
        deadline_s: float,
    ) -> OpenedGroup:
        """Has `engine_ids`, or all engines, minus `without`, join a new group for the nccl transport; returns at once.

        All meet at `store_address` within `deadline_s`. The group is for versions that are sealed from now on. Raises
        GROUP_BROKEN while no engine can take part.
        """
        request = pb.OpenGroupRequest(
            request_id=str(uuid.uuid4()),
            run_id=run_id,
            epoch=epoch,
            store_address=store_address,
            backend=backend,
            num_senders=num_senders,
            engine_ids=engine_ids,
            without=without,
            deadline_s=deadline_s,
        )
        return convert.from_proto(OpenedGroup, await self._unary(self._stub.OpenGroup, "OpenGroup", request))

    async def sleep_engines(self, engine_pool: str = "", *, deadline_s: float) -> SleepOutcome:
        """Has engines without work give their memory back until the next version or request.

        Those without an answer after `deadline_s` count as awake."""
        request = pb.SleepEnginesRequest(engine_pool=engine_pool, deadline_s=deadline_s)
        limit_s = deadline_s + self.options.unary_deadline_s
        return convert.from_proto(
            SleepOutcome, await self._unary(self._stub.SleepEngines, "SleepEngines", request, limit_s)
        )

    async def list_engines(self, engine_pool: str = "") -> tuple[EngineInfo, ...]:
        """In order of registration. Raises CONTRACT_MISMATCH for a hub of another major version."""
        response = await self._list_engines(engine_pool)
        return tuple(convert.from_proto(EngineInfo, engine) for engine in response.engines)

    async def epoch(self) -> int:
        """The epoch of the trainer that publishes; 0 before the first. A successor begins the next one."""
        return int((await self._list_engines()).epoch)

    async def _list_engines(self, engine_pool: str = "") -> pb.ListEnginesResponse:
        request = pb.ListEnginesRequest(engine_pool=engine_pool, contract_version=CONTRACT_VERSION)
        response: pb.ListEnginesResponse = await self._unary(self._stub.ListEngines, "ListEngines", request)
        validate_contract_version(response.contract_version)
        self.capabilities = frozenset(response.capabilities)
        return response
