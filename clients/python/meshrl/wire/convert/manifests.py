"""Manifests and the bytes they name: messages to dataclasses and back."""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire import tensors
from meshrl.wire.convert.fields import FieldReader, optional
from meshrl.wire.types import (
    AdapterConfig,
    Chunk,
    ChunkEntry,
    CollectivePlan,
    FileEntry,
    Manifest,
    StagedVersion,
    TensorEntry,
    Transport,
    VersionKind,
)

TRANSPORTS: Mapping[Transport, pb.Transport] = {
    Transport.FILESYSTEM: pb.TRANSPORT_FILESYSTEM,
    Transport.STREAM: pb.TRANSPORT_STREAM,
    Transport.NCCL: pb.TRANSPORT_NCCL,
}
TRANSPORT_OF: Mapping[int, Transport] = {number: value for value, number in TRANSPORTS.items()}
_KINDS: Mapping[VersionKind, pb.VersionKind] = {
    VersionKind.FULL: pb.VERSION_KIND_FULL,
    VersionKind.DELTA: pb.VERSION_KIND_DELTA,
    VersionKind.LORA: pb.VERSION_KIND_LORA,
}
_KIND_OF: Mapping[int, VersionKind] = {number: value for value, number in _KINDS.items()}


def manifest_to_proto(manifest: Manifest) -> pb.Manifest:
    return pb.Manifest(
        run_id=manifest.run_id,
        epoch=manifest.epoch,
        version=manifest.version,
        kind=_KINDS[manifest.kind],
        transport=TRANSPORTS[manifest.transport],
        base_version=manifest.base_version,
        base_root=manifest.base_root,
        result_root=manifest.result_root,
        layout_signature=manifest.layout_signature,
        codec=manifest.codec,
        tensors=[
            pb.TensorEntry(
                name=entry.name,
                dtype=tensors.dtype_number(entry.dtype),
                shape=entry.shape,
                offset=entry.offset,
                num_bytes=entry.num_bytes,
                digest=entry.digest,
            )
            for entry in manifest.tensors
        ],
        chunks=[pb.ChunkEntry(offset=c.offset, length=c.length, digest=c.digest) for c in manifest.chunks],
        files=[pb.FileEntry(path=f.path, offset=f.offset, num_bytes=f.num_bytes) for f in manifest.files],
        digest_algorithm=manifest.digest_algorithm,
        collective=_plan_to_proto(manifest.collective),
        adapter=_adapter_to_proto(manifest.adapter),
    )


def manifest_from_proto(message: pb.Manifest) -> Manifest:
    """Returns the manifest; raises INVALID_REQUEST for a kind, transport or element type not known here."""
    reader = FieldReader("the manifest", "manifest")
    kind, transport = _KIND_OF.get(message.kind), TRANSPORT_OF.get(message.transport)
    reader.check(kind is not None, "kind", f"{message.kind} is not known here")
    reader.check(transport is not None, "transport", f"{message.transport} is not known here")
    dtypes = [tensors.dtype_name(entry.dtype) for entry in message.tensors]
    for index, dtype in enumerate(dtypes):
        reader.check(dtype is not None, f"tensors[{index}].dtype", f"{message.tensors[index].dtype} is not known here")
    reader.done()
    return Manifest(
        run_id=message.run_id,
        epoch=message.epoch,
        version=message.version,
        kind=kind or VersionKind.FULL,
        transport=transport or Transport.STREAM,
        base_version=optional(message, "base_version"),
        base_root=message.base_root,
        result_root=message.result_root,
        layout_signature=message.layout_signature,
        codec=message.codec,
        tensors=tuple(
            TensorEntry(
                name=entry.name,
                dtype=dtype or "",
                shape=tuple(entry.shape),
                offset=entry.offset,
                num_bytes=entry.num_bytes,
                digest=entry.digest,
            )
            for entry, dtype in zip(message.tensors, dtypes, strict=True)
        ),
        chunks=tuple(ChunkEntry(offset=c.offset, length=c.length, digest=c.digest) for c in message.chunks),
        files=tuple(FileEntry(path=f.path, offset=f.offset, num_bytes=f.num_bytes) for f in message.files),
        digest_algorithm=message.digest_algorithm,
        collective=_plan_from_proto(message.collective) if message.HasField("collective") else None,
        adapter=_adapter_from_proto(message.adapter) if message.HasField("adapter") else None,
    )


def _plan_to_proto(plan: CollectivePlan | None) -> pb.CollectivePlan | None:
    if plan is None:
        return None
    return pb.CollectivePlan(
        num_senders=plan.num_senders, bucket_bytes=plan.bucket_bytes, whole_tensors=plan.whole_tensors
    )


def _plan_from_proto(message: pb.CollectivePlan) -> CollectivePlan:
    return CollectivePlan(
        num_senders=message.num_senders,
        bucket_bytes=message.bucket_bytes,
        whole_tensors=tuple(message.whole_tensors),
    )


def _adapter_to_proto(adapter: AdapterConfig | None) -> pb.AdapterConfig | None:
    if adapter is None:
        return None
    return pb.AdapterConfig(
        rank=adapter.rank,
        lora_alpha=adapter.lora_alpha,
        target_modules=adapter.target_modules,
        base_model=adapter.base_model,
    )


def _adapter_from_proto(message: pb.AdapterConfig) -> AdapterConfig:
    return AdapterConfig(
        rank=message.rank,
        lora_alpha=message.lora_alpha,
        target_modules=tuple(message.target_modules),
        base_model=message.base_model,
    )


def chunk_to_proto(chunk: Chunk) -> pb.Chunk:
    return pb.Chunk(offset=chunk.offset, data=bytes(chunk.data), crc32c=chunk.crc32c)


def chunk_from_proto(message: pb.Chunk) -> Chunk:
    return Chunk(offset=message.offset, data=message.data, crc32c=message.crc32c)


def staged_version_to_proto(staged: StagedVersion) -> pb.CreateVersionResponse:
    return pb.CreateVersionResponse(
        artifact_id=staged.artifact_id,
        missing_offsets=staged.missing_offsets,
        max_chunk_bytes=staged.max_chunk_bytes,
    )


def staged_version_from_proto(message: pb.CreateVersionResponse) -> StagedVersion:
    return StagedVersion(
        artifact_id=message.artifact_id,
        missing_offsets=tuple(message.missing_offsets),
        max_chunk_bytes=message.max_chunk_bytes,
    )
