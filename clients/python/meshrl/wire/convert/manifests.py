"""Manifests that exceed one message: a header without lists, then parts of those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire.convert.by_annotation import from_proto, to_proto
from meshrl.wire.types import Manifest

PART_BYTES = 2**20
"""Of a part; gRPC takes 4 MiB by default."""
_TAG_BYTES = 4  # of an entry in its list: the field and the length


def manifest_header(manifest: Manifest) -> pb.Manifest:
    header: pb.Manifest = to_proto(replace(manifest, tensors=(), chunks=(), files=()))
    return header


def manifest_parts(manifest: Manifest) -> Iterator[pb.ManifestPart]:
    """The lists that the header lacks, in order."""
    part, size = pb.ManifestPart(), 0
    for name in ("tensors", "chunks", "files"):
        for entry in getattr(manifest, name):
            message = to_proto(entry)
            added = message.ByteSize() + _TAG_BYTES
            if size + added > PART_BYTES:
                yield part
                part, size = pb.ManifestPart(), 0
            getattr(part, name).append(message)
            size += added
    if size:
        yield part


def manifest_size(manifest: Manifest) -> pb.ManifestSize:
    return pb.ManifestSize(
        num_tensors=len(manifest.tensors),
        num_chunks=len(manifest.chunks),
        num_files=len(manifest.files),
        message_bytes=to_proto(manifest).ByteSize(),
    )


def manifest_of(header: pb.Manifest, parts: Iterable[pb.ManifestPart]) -> Manifest:
    """Raises as `from_proto`."""
    whole = pb.Manifest()
    whole.CopyFrom(header)
    for part in parts:
        whole.tensors.extend(part.tensors)
        whole.chunks.extend(part.chunks)
        whole.files.extend(part.files)
    return from_proto(Manifest, whole, "manifest")
