"""Checks of a WeightSync by small versions that are published to it, with --full."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire.convert import manifest_header, manifest_of, manifest_parts, to_proto
from meshrl.wire.errors import Reason
from meshrl.wire.manifest import MIN_CHUNK_BYTES, artifact_id, build_manifest, entries_of, plan_tensors
from meshrl.wire.types import CONTRACT_VERSION, Manifest, Transport, capabilities
from meshrl_conformance.every_service import first_call, since_1_1
from meshrl_conformance.probe import NotCheckedError, Probe, RefusedError, RuleBrokenError, checks, must

VALUES = 3 * MIN_CHUNK_BYTES // 4 - 5  # float32 values of three chunks, the last of them short
MOST_PART_BYTES = 2**20 + 2**10
CRC32C = 0x82F63B78  # Castagnoli's polynomial, reversed


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli); slow, for little data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (CRC32C if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class SmallVersion:
    """One tensor over the stream transport, with its bytes."""

    manifest: Manifest
    data: bytes

    @property
    def artifact_id(self) -> str:
        return artifact_id(self.manifest)

    def upload(self, *chunks: int, damaged: bool = False) -> Sequence[pb.CreateVersionRequest]:
        """The manifest, then the chunks of these numbers, or all; `damaged` ones have wrong checksums."""
        messages = [pb.CreateVersionRequest(manifest=to_proto(self.manifest))]
        for number, entry in enumerate(self.manifest.chunks):
            if not chunks or number in chunks:
                piece = self.data[entry.offset : entry.offset + entry.length]
                chunk = pb.Chunk(offset=entry.offset, data=piece, crc32c=crc32c(piece) ^ damaged)
                messages.append(pb.CreateVersionRequest(chunk=chunk))
        return messages

    def seal(self) -> pb.SealVersionRequest:
        """With a request id of its own."""
        named = self.manifest
        return pb.SealVersionRequest(
            request_id=str(uuid.uuid4()), run_id=named.run_id, epoch=named.epoch, version=named.version,
            artifact_id=self.artifact_id,
        )  # fmt: skip


async def _version(probe: Probe, seed: int, *, epochs_ahead: int = 0) -> SmallVersion:
    """The next of this check's own epoch, which the first one begins."""
    if "epoch" not in probe.memory:
        (listed,) = await probe.call("ListEngines", pb.ListEnginesRequest())
        probe.memory["epoch"], probe.memory["version"] = listed.epoch + 1, 0
    if not epochs_ahead:
        probe.memory["version"] += 1
    values = np.random.default_rng(seed).standard_normal(VALUES).astype("<f4")
    data = values.tobytes()
    tensors, chunks = entries_of(memoryview(data), plan_tensors([("w", "float32", (VALUES,))]), MIN_CHUNK_BYTES)
    manifest = build_manifest(
        run_id="conformance",
        epoch=probe.memory["epoch"] + epochs_ahead,
        version=probe.memory["version"] or 1,
        transport=Transport.STREAM,
        tensors=tensors,
        chunks=chunks,
    )
    return SmallVersion(manifest=manifest, data=data)


async def _sealed(probe: Probe) -> SmallVersion:
    if "sealed" not in probe.memory:
        version = await _version(probe, seed=0)
        await probe.call("CreateVersion", *version.upload())
        await probe.call("SealVersion", version.seal())
        probe.memory["sealed"] = version
    found: SmallVersion = probe.memory["sealed"]
    return found


@checks("weights.epoch")
async def _epoch(probe: Probe) -> None:
    await _sealed(probe)  # begins this check's epoch
    ahead = await _version(probe, seed=1, epochs_ahead=2)
    await probe.refused("CreateVersion", *ahead.upload(), reason=Reason.INVALID_REQUEST)
    older = await _version(probe, seed=1, epochs_ahead=-1)
    if older.manifest.epoch >= 1:
        await probe.refused("CreateVersion", *older.upload(), reason=Reason.STALE_EPOCH)


@checks("weights.resume")
async def _resume(probe: Probe) -> None:
    version = await _version(probe, seed=2)
    missing = [version.manifest.chunks[0].offset, version.manifest.chunks[2].offset]
    (staged,) = await probe.call("CreateVersion", *version.upload(1))
    must(staged.artifact_id == version.artifact_id, f"the hub calls it {staged.artifact_id}")
    must(list(staged.missing_offsets) == missing, f"missing are {missing}, the hub says {list(staged.missing_offsets)}")
    (staged,) = await probe.call("CreateVersion", *version.upload(0, 2))
    must(not staged.missing_offsets, f"all chunks came, and {list(staged.missing_offsets)} are missing")


@checks("weights.checksum")
async def _checksum(probe: Probe) -> None:
    version = await _version(probe, seed=3)
    await probe.refused("CreateVersion", *version.upload(damaged=True), reason=Reason.CHUNK_CORRUPT)


@checks("weights.seal")
async def _seal(probe: Probe) -> None:
    version = await _version(probe, seed=4)
    await probe.call("CreateVersion", *version.upload(0))
    await probe.refused("SealVersion", version.seal(), reason=Reason.CHUNKS_MISSING)
    await probe.call("CreateVersion", *version.upload(1, 2))
    for _ in range(2):
        (sealed,) = await probe.call("SealVersion", version.seal())
        state = pb.VersionState.Name(sealed.version.state)
        must(sealed.version.state == pb.VERSION_STATE_SEALED, f"the sealed version is {state}")


@checks("weights.digests")
async def _digests(probe: Probe) -> None:
    version = await _version(probe, seed=5)
    other = replace(version, data=bytes(len(version.data)))  # whose checksums are right
    try:
        await probe.call("CreateVersion", *other.upload())
        await probe.call("SealVersion", version.seal())
    except RefusedError as refusal:
        must(refusal.code is Reason.DIGEST_MISMATCH.code, f"{refusal}; must end with DATA_LOSS")
        return
    raise RuleBrokenError("a version was sealed whose bytes are not those of its manifest")


@checks("weights.fetch")
async def _fetch(probe: Probe) -> None:
    version = await _sealed(probe)
    await _fetched(probe, version, 0, len(version.data))
    await _fetched(probe, version, 100, MIN_CHUNK_BYTES)


async def _fetched(probe: Probe, version: SmallVersion, start: int, length: int) -> None:
    wanted = pb.FetchRequest(artifact_id=version.artifact_id, ranges=[pb.ByteRange(offset=start, length=length)])
    have, came = bytearray(length), 0
    for answer in await probe.call("Fetch", wanted):
        chunk: Any = answer.chunk
        must(chunk.crc32c == crc32c(chunk.data), f"the chunk at {chunk.offset} does not match its checksum")
        at = chunk.offset - start
        must(0 <= at <= length - len(chunk.data), f"the chunk at {chunk.offset} was not asked for")
        have[at : at + len(chunk.data)] = chunk.data
        came += len(chunk.data)
    must(came == length, f"{length} bytes from {start} were asked for, {came} came")
    must(bytes(have) == version.data[start : start + length], f"the bytes from {start} are not those that were sent")


@checks("weights.conflict")
async def _conflict(probe: Probe) -> None:
    version = await _sealed(probe)
    other = await _version(probe, seed=6)
    named = replace(other.manifest, version=version.manifest.version)
    request = replace(other, manifest=named).upload()
    await probe.refused("CreateVersion", *request, reason=Reason.VERSION_CONFLICT)


@checks("weights.request-id")
async def _request_id(probe: Probe) -> None:
    version = await _sealed(probe)
    request = version.seal()
    await probe.call("SealVersion", request)
    request.version += 1
    await probe.refused("SealVersion", request, reason=Reason.DUPLICATE_REQUEST)


@checks("weights.not-ready")
async def _not_ready(probe: Probe) -> None:
    (listed,) = await probe.call("ListEngines", pb.ListEnginesRequest())
    if any(engine.state != pb.AGENT_STATE_JOINING for engine in listed.engines):
        raise NotCheckedError("engines are registered, which would take the version")
    version = await _sealed_now(probe)
    request = pb.ActivateVersionRequest(
        request_id=str(uuid.uuid4()), run_id="conformance", version=version.manifest.version,
        policy=pb.ACTIVATION_POLICY_ROLLING, min_ready=100, prepare_deadline_s=0.2,
    )  # fmt: skip
    await probe.refused("ActivateVersion", request, reason=Reason.ENGINES_NOT_READY)
    (sealed,) = await probe.call("SealVersion", version.seal())
    must(sealed.version.state == pb.VERSION_STATE_SEALED, "the version is not sealed any more")


@checks("weights.parts")
async def _parts(probe: Probe) -> None:
    method, request = first_call("weights", CONTRACT_VERSION, sound=True)
    (answer,) = await probe.call(method, request)
    if capabilities.MANIFEST_PARTS not in answer.capabilities:
        raise NotCheckedError(f"the server does not list the capability {capabilities.MANIFEST_PARTS}")
    version = await _version(probe, seed=9)
    manifest, (_, *chunks) = version.manifest, version.upload()
    header = pb.CreateVersionRequest(manifest=manifest_header(manifest))
    parts = [pb.CreateVersionRequest(manifest_part=part) for part in manifest_parts(manifest)]
    (staged,) = await probe.call("CreateVersion", header, *parts, *chunks)
    must(staged.artifact_id == artifact_id(manifest), "a manifest that came in parts has another artifact id")
    await probe.call("SealVersion", version.seal())
    first, *pieces = await probe.call("FetchManifest", pb.FetchManifestRequest(artifact_id=staged.artifact_id))
    must(first.HasField("header") and not first.header.tensors, "FetchManifest does not begin with a header")
    must(all(piece.ByteSize() <= MOST_PART_BYTES for piece in pieces), "a part has more than 1 MiB")
    must(manifest_of(first.header, [piece.part for piece in pieces]) == manifest, "FetchManifest returns another one")


@checks("weights.content")
async def _content(probe: Probe) -> None:
    await since_1_1(probe)
    version = await _sealed_now(probe)
    named: dict[str, Any] = {"run_id": "conformance", "version": version.manifest.version}
    others: tuple[dict[str, Any], ...] = ({"artifact_id": "0" * 64}, {"epoch": version.manifest.epoch + 1})
    for wrong in others:
        activation = pb.ActivateVersionRequest(
            request_id=str(uuid.uuid4()), prepare_deadline_s=0.2, min_ready=100, **named, **wrong
        )
        await probe.refused("ActivateVersion", activation, reason=Reason.VERSION_CONFLICT)
    abort = pb.AbortVersionRequest(
        request_id=str(uuid.uuid4()), epoch=version.manifest.epoch, artifact_id="0" * 64, **named
    )
    await probe.refused("AbortVersion", abort, reason=Reason.VERSION_CONFLICT)


@checks("weights.abort")
async def _abort(probe: Probe) -> None:
    version = await _sealed_now(probe)
    for _ in range(2):
        request = pb.AbortVersionRequest(
            request_id=str(uuid.uuid4()), run_id="conformance", epoch=version.manifest.epoch,
            version=version.manifest.version, message="it has served its purpose",
        )  # fmt: skip
        (aborted,) = await probe.call("AbortVersion", request)
        state = pb.VersionState.Name(aborted.version.state)
        must(aborted.version.state == pb.VERSION_STATE_ABORTED, f"the aborted version is {state}")


async def _sealed_now(probe: Probe) -> SmallVersion:
    """The newest version; it replaces those before."""
    version = await _version(probe, seed=7)
    await probe.call("CreateVersion", *version.upload())
    await probe.call("SealVersion", version.seal())
    return version
