"""Manifests of weight versions: tensors, chunks and hashes that identify a version's bytes.

Every hash is BLAKE3 over length-prefixed byte strings, so no two values share an encoding. docs/contract.md has the
formats.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from meshrl.wire.tensors import DTYPES
from meshrl.wire.types import (
    AdapterConfig,
    ChunkEntry,
    CollectivePlan,
    FileEntry,
    Manifest,
    TensorEntry,
    Transport,
    VersionKind,
)

DEFAULT_CHUNK_BYTES = 2 * 2**20
MIN_CHUNK_BYTES = 4096
DIGEST_BYTES = 32
SUM128 = "sum128"
DIGEST_BYTES_OF: Mapping[str, int] = {"": DIGEST_BYTES, "blake3": DIGEST_BYTES, SUM128: 16}
"""By the manifest's digest_algorithm."""
CODEC_RAW, CODEC_DELTA = "raw", "gap-ulp.zstd"

Layout = tuple[tuple[str, str, tuple[int, ...]], ...]  # (name, dtype, shape) of each tensor

Each = Callable[..., Iterable[Any]]  # `map` over (offset, length), or the same on threads


def digest(data: bytes | memoryview) -> bytes:
    """32-byte BLAKE3; releases the GIL for large inputs."""
    return blake3(data).digest()


def _field(value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        value = struct.pack("<q", value)
    elif isinstance(value, str):
        value = value.encode()
    return struct.pack("<Q", len(value)) + value


def _shape(shape: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(shape)}q", *shape)


def _hash_fields(domain: str, fields: Iterable[bytes | str | int]) -> blake3:
    state = blake3()
    state.update(_field(domain))
    for value in fields:
        state.update(_field(value))
    return state


def layout_signature(specs: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Over (name, dtype, shape) in any order: a version fits models of equal ones alone."""
    fields: list[bytes | str] = []
    for name, dtype, shape in sorted(specs, key=lambda spec: spec[0]):
        fields += [name, dtype, _shape(shape)]
    return _hash_fields("meshrl.layout.v1", fields).digest()


def result_root(entries: Iterable[TensorEntry]) -> bytes:
    """By names and values alone: engines with equal roots hold equal weights to the bit."""
    return root_of((entry.name, entry.dtype, entry.shape, entry.digest) for entry in entries)


def root_of(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """Over (name, dtype, shape, BLAKE3 of the little-endian C-order bytes) of every tensor, by name."""
    fields: list[bytes | str] = []
    for name, dtype, shape, tensor_digest in sorted(tensors, key=lambda tensor: tensor[0]):
        fields += [name, dtype, _shape(shape), tensor_digest]
    return _hash_fields("meshrl.root.v1", fields).digest()


def artifact_id(manifest: Manifest) -> str:
    """BLAKE3 of the canonical form, as 64 hexadecimal digits."""
    fields: list[bytes | str | int] = [
        manifest.run_id,
        manifest.epoch,
        manifest.version,
        manifest.kind.value,
        manifest.transport.value,
        -1 if manifest.base_version is None else manifest.base_version,
        manifest.base_root,
        manifest.result_root,
        manifest.layout_signature,
        manifest.codec,
        len(manifest.tensors),
    ]
    for tensor in manifest.tensors:
        fields += [tensor.name, tensor.dtype, _shape(tensor.shape), tensor.offset, tensor.num_bytes, tensor.digest]
    fields.append(len(manifest.chunks))
    for chunk in manifest.chunks:
        fields += [chunk.offset, chunk.length, chunk.digest]
    fields.append(len(manifest.files))
    for file in manifest.files:
        fields += [file.path, file.offset, file.num_bytes]
    # Younger fields count only where they are set, so that artifacts without them keep their names.
    if manifest.digest_algorithm:
        fields += ["digest_algorithm", manifest.digest_algorithm]
    if (plan := manifest.collective) is not None:
        fields += ["collective", plan.num_senders, plan.bucket_bytes, _shape(plan.whole_tensors)]
        if plan.reordered_tensors:
            fields += ["row_order", _shape(plan.reordered_tensors), _shape(plan.row_order)]
    if (adapter := manifest.adapter) is not None:
        fields += ["adapter", adapter.rank, struct.pack("<d", adapter.lora_alpha), adapter.base_model]
        fields += [len(adapter.target_modules), *adapter.target_modules]
    return _hash_fields("meshrl.manifest.v1", fields).hexdigest()


def plan_tensors(specs: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[TensorEntry, ...]:
    """In the order of the byte stream, without digests. Raises ValueError for an unknown dtype or a repeated name."""
    plans: list[TensorEntry] = []
    seen: set[str] = set()
    offset = 0
    for name, dtype, shape in sorted(specs, key=_stream_order):
        if name in seen:
            raise ValueError(f"tensor name {name!r} is used twice; leave tied duplicates out")
        seen.add(name)
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        plans.append(TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset=offset, num_bytes=num_bytes))
        offset += num_bytes
    return tuple(plans)


def _stream_order(spec: tuple[str, str, Sequence[int]]) -> tuple[int, str]:
    if spec[1] not in DTYPES:
        raise ValueError(f"tensor {spec[0]!r} has unknown dtype {spec[1]!r}; known: {', '.join(sorted(DTYPES))}")
    return (-DTYPES[spec[1]].itemsize, spec[0])


def plan_chunks(num_bytes: int, chunk_bytes: int) -> tuple[tuple[int, int], ...]:
    """(offset, length) of at most `chunk_bytes`, in order."""
    if chunk_bytes < MIN_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes must be at least {MIN_CHUNK_BYTES}, got {chunk_bytes}")
    return tuple((offset, min(chunk_bytes, num_bytes - offset)) for offset in range(0, num_bytes, chunk_bytes))


def entries_of(
    stream: memoryview,
    plans: Sequence[TensorEntry],
    chunk_bytes: int,
    *,
    each: Each = map,
) -> tuple[tuple[TensorEntry, ...], tuple[ChunkEntry, ...]]:
    """A manifest's tensors and chunks for a byte stream in memory. Raises ValueError if the stream is not as long as
    its plan."""
    num_bytes = sum(plan.num_bytes for plan in plans)
    if len(stream) != num_bytes:
        raise ValueError(f"the byte stream has {len(stream)} bytes, its plan {num_bytes}")
    spans = [(plan.offset, plan.num_bytes) for plan in plans]
    pieces = plan_chunks(num_bytes, chunk_bytes)
    digests = iter(each(lambda span: digest(stream[span[0] : sum(span)]), [*spans, *pieces]))
    tensors = tuple(replace(plan, digest=next(digests)) for plan in plans)
    chunks = (ChunkEntry(offset=offset, length=length, digest=next(digests)) for offset, length in pieces)
    return tensors, tuple(chunks)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """`base_layout`: the layout signature of its model."""

    config: AdapterConfig
    base_layout: bytes


def build_manifest(
    *,
    run_id: str,
    epoch: int,
    version: int,
    transport: Transport,
    tensors: tuple[TensorEntry, ...],
    chunks: tuple[ChunkEntry, ...],
    files: tuple[FileEntry, ...] = (),
    collective: CollectivePlan | None = None,
    adapter: Adapter | None = None,
) -> Manifest:
    """The tensors decide the root, and a full version's layout. `collective` makes a broadcast with SUM128 in place
    of BLAKE3, `adapter` a LoRA version."""
    own_layout = layout_signature((entry.name, entry.dtype, entry.shape) for entry in tensors)
    return Manifest(
        run_id=run_id,
        epoch=epoch,
        version=version,
        kind=VersionKind.FULL if adapter is None else VersionKind.LORA,
        transport=transport,
        result_root=result_root(tensors),
        layout_signature=own_layout if adapter is None else adapter.base_layout,
        codec=CODEC_RAW,
        tensors=tensors,
        chunks=chunks,
        files=files,
        digest_algorithm="" if collective is None else SUM128,
        collective=collective,
        adapter=None if adapter is None else adapter.config,
    )


def delta_manifest(base: Manifest, result: Manifest, chunks: tuple[ChunkEntry, ...]) -> Manifest:
    """A delta between weights of SUM128; it travels as `result`."""
    return replace(
        result,
        kind=VersionKind.DELTA,
        base_version=base.version,
        base_root=base.result_root,
        codec=CODEC_DELTA,
        chunks=chunks,
        files=(),
    )


def chunks_of(stream: memoryview, chunk_bytes: int, *, each: Each = map) -> tuple[ChunkEntry, ...]:
    def entry(span: tuple[int, int]) -> ChunkEntry:
        offset, length = span
        return ChunkEntry(offset=offset, length=length, digest=digest(stream[offset : offset + length]))

    return tuple(each(entry, plan_chunks(len(stream), chunk_bytes)))
