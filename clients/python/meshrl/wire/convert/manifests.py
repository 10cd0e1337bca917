"""Messages of manifests, chunks and files to dataclasses and back."""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire import tensors
from meshrl.wire.convert.fields import FieldReader, from_message, to_message
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
    return to_message(
        pb.Manifest,
        manifest,
        kind=_KINDS[manifest.kind],
        transport=TRANSPORTS[manifest.transport],
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
        files=[to_message(pb.FileEntry, file) for file in manifest.files],
        collective=None if manifest.collective is None else to_message(pb.CollectivePlan, manifest.collective),
        adapter=None if manifest.adapter is None else to_message(pb.AdapterConfig, manifest.adapter),
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
    return from_message(
        Manifest,
        message,
        kind=kind,
        transport=transport,
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
        files=tuple(from_message(FileEntry, file) for file in message.files),
        collective=from_message(CollectivePlan, message.collective) if message.HasField("collective") else None,
        adapter=from_message(AdapterConfig, message.adapter) if message.HasField("adapter") else None,
    )


def chunk_to_proto(chunk: Chunk) -> pb.Chunk:
    return to_message(pb.Chunk, chunk, data=bytes(chunk.data))


def chunk_from_proto(message: pb.Chunk) -> Chunk:
    return from_message(Chunk, message)


def staged_version_to_proto(staged: StagedVersion) -> pb.CreateVersionResponse:
    return to_message(pb.CreateVersionResponse, staged)


def staged_version_from_proto(message: pb.CreateVersionResponse) -> StagedVersion:
    return from_message(StagedVersion, message)
