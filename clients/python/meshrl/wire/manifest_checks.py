"""Contradictions in manifests, which the hub refuses before it takes bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshrl.wire.manifest import (
    CODEC_DELTA,
    CODEC_RAW,
    DIGEST_BYTES,
    DIGEST_BYTES_OF,
    SUM128,
    layout_signature,
    result_root,
)
from meshrl.wire.tensors import DTYPES
from meshrl.wire.types import CollectivePlan, Manifest, TensorEntry, Transport, VersionKind


def violations(manifest: Manifest, *, max_chunk_bytes: int) -> list[tuple[str, str]]:
    """(field, what to change) of each."""
    found = _kind_violations(manifest)
    if manifest.digest_algorithm not in DIGEST_BYTES_OF:
        known = ", ".join(sorted(filter(None, DIGEST_BYTES_OF)))
        return [*found, ("digest_algorithm", f"must be one of {known}, got {manifest.digest_algorithm!r}")]
    found += _tensor_violations(manifest.tensors, DIGEST_BYTES_OF[manifest.digest_algorithm])
    if found:
        return found
    found += _root_violations(manifest)
    if manifest.transport is Transport.NCCL:
        return found + _collective_violations(manifest)
    return found + _byte_violations(manifest, max_chunk_bytes)


def _kind_violations(manifest: Manifest) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if not manifest.run_id:
        found.append(("run_id", "must not be empty"))
    if manifest.epoch < 1:
        found.append(("epoch", f"must be at least 1, got {manifest.epoch}"))
    is_delta = manifest.kind is VersionKind.DELTA
    if is_delta != (manifest.base_version is not None) or is_delta != (len(manifest.base_root) == DIGEST_BYTES):
        found.append(("base_root", "and base_version must be set for kind delta, and only there"))
    if is_delta and (manifest.transport is Transport.FILESYSTEM or manifest.digest_algorithm != SUM128):
        found.append(("kind", f"deltas travel by transport stream or nccl and have {SUM128} digests"))
    if (manifest.kind is VersionKind.LORA) != (manifest.adapter is not None):
        found.append(("adapter", "must be set for kind lora, and only there"))
    elif manifest.adapter is not None and manifest.adapter.rank < 1:
        found.append(("adapter.rank", f"must be at least 1, got {manifest.adapter.rank}"))
    codec = CODEC_DELTA if is_delta else CODEC_RAW
    if manifest.codec != codec:
        found.append(("codec", f"must be {codec!r} for kind {manifest.kind.value}, got {manifest.codec!r}"))
    return found


def _root_violations(manifest: Manifest) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if manifest.result_root != result_root(manifest.tensors):
        found.append(("result_root", "is not the root of the tensors listed"))
    own_layout = layout_signature((t.name, t.dtype, t.shape) for t in manifest.tensors)
    if manifest.kind is not VersionKind.LORA and manifest.layout_signature != own_layout:
        found.append(("layout_signature", "is not the signature of the tensors listed"))
    elif len(manifest.layout_signature) != DIGEST_BYTES:
        found.append(("layout_signature", f"must have {DIGEST_BYTES} bytes, got {len(manifest.layout_signature)}"))
    return found


def _byte_violations(manifest: Manifest, max_chunk_bytes: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if manifest.collective is not None:
        found.append(("collective", "must be unset unless transport is nccl"))
    found += _chunk_violations(manifest)
    found += [
        (f"chunks[{index}].length", f"must be at most {max_chunk_bytes} bytes, got {chunk.length}")
        for index, chunk in enumerate(manifest.chunks)
        if chunk.length > max_chunk_bytes
    ][:1]
    if manifest.transport is Transport.FILESYSTEM:
        files = [(file.offset, file.num_bytes) for file in manifest.files]
        found += _span_violations("files", files, manifest.payload_bytes)
    elif manifest.files:
        found.append(("files", "must be empty unless transport is filesystem"))
    return found


def _chunk_violations(manifest: Manifest) -> list[tuple[str, str]]:
    spans = [(chunk.offset, chunk.length) for chunk in manifest.chunks]
    found = _span_violations("chunks", spans, manifest.payload_bytes)
    found += [
        (f"chunks[{index}].digest", f"must have {DIGEST_BYTES} bytes, got {len(chunk.digest)}")
        for index, chunk in enumerate(manifest.chunks)
        if len(chunk.digest) != DIGEST_BYTES
    ][:1]
    return found


def _collective_violations(manifest: Manifest) -> list[tuple[str, str]]:
    plan = manifest.collective
    if plan is None:
        return [("collective", "must be set for transport nccl")]
    found: list[tuple[str, str]] = []
    if manifest.kind is VersionKind.DELTA:
        if len(manifest.chunks) != plan.num_senders:
            found.append(("chunks", f"must be one for each sender of a delta, got {len(manifest.chunks)}"))
        found += _chunk_violations(manifest)
    elif manifest.chunks:
        found.append(("chunks", "must be empty for transport nccl, unless it is a delta: the bytes travel in a group"))
    if manifest.files:
        found.append(("files", "must be empty for transport nccl: the bytes travel in a group"))
    if manifest.digest_algorithm != SUM128:
        found.append(("digest_algorithm", f"must be {SUM128} for transport nccl, got {manifest.digest_algorithm!r}"))
    if plan.num_senders < 1:
        found.append(("collective.num_senders", f"must be at least 1, got {plan.num_senders}"))
    if plan.bucket_bytes < 1:
        found.append(("collective.bucket_bytes", f"must be at least 1, got {plan.bucket_bytes}"))
    whole = set(plan.whole_tensors)
    if len(whole) != len(plan.whole_tensors) or any(not 0 <= index < len(manifest.tensors) for index in whole):
        found.append(("collective.whole_tensors", f"must be distinct indices of the {len(manifest.tensors)} tensors"))
    elif plan.num_senders > 1:
        odd = [i for i, t in enumerate(manifest.tensors) if i not in whole and DTYPES[t.dtype].itemsize % 2]
        if odd:
            name = manifest.tensors[odd[0]].name
            text = f"must list {name!r}: {SUM128} adds up 16-bit words, so tensors of 1-byte elements go whole"
            found.append(("collective.whole_tensors", text))
    return found + list(_order_violations(plan, manifest.tensors))


def _order_violations(plan: CollectivePlan, tensors: Sequence[TensorEntry]) -> Iterator[tuple[str, str]]:
    reordered = plan.reordered_tensors
    if sorted(plan.row_order) != list(range(plan.num_senders if reordered else 0)):
        parts = f"of 0 to {plan.num_senders - 1}" if reordered else "of nothing without reordered_tensors"
        yield "collective.row_order", f"must be a permutation {parts}, got {list(plan.row_order)}"
    if any(not 0 <= index < len(tensors) or index in plan.whole_tensors for index in reordered):
        yield "collective.reordered_tensors", f"must be indices of the {len(tensors)} tensors that do not go whole"
    elif any(not tensors[i].shape or tensors[i].shape[0] % max(1, plan.num_senders) for i in reordered):
        yield "collective.reordered_tensors", f"must have a multiple of {plan.num_senders} rows"


def _tensor_violations(tensors: Sequence[TensorEntry], digest_bytes: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if not tensors:
        found.append(("tensors", "must not be empty"))
    if len({tensor.name for tensor in tensors}) != len(tensors):
        found.append(("tensors", "must have distinct names"))
    offset = 0
    for index, tensor in enumerate(tensors):
        where = f"tensors[{index}]"
        if tensor.dtype not in DTYPES:
            found.append((f"{where}.dtype", f"is unknown: {tensor.dtype!r}"))
        elif any(length < 0 for length in tensor.shape):
            found.append((f"{where}.shape", f"must not be negative, got {tensor.shape}"))
        elif tensor.num_bytes != math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize:
            found.append((f"{where}.num_bytes", f"does not match dtype and shape, got {tensor.num_bytes}"))
        elif tensor.offset != offset:
            found.append((f"{where}.offset", f"must be {offset}, got {tensor.offset}: tensors follow without gaps"))
        elif len(tensor.digest) != digest_bytes:
            found.append((f"{where}.digest", f"must have {digest_bytes} bytes, got {len(tensor.digest)}"))
        offset = tensor.offset + tensor.num_bytes
        if found:
            break  # what follows a wrong entry is only noise
    return found


def _span_violations(name: str, spans: Sequence[tuple[int, int]], num_bytes: int) -> list[tuple[str, str]]:
    end = 0
    for index, (offset, length) in enumerate(spans):
        if offset != end or length <= 0:
            return [(f"{name}[{index}]", f"must start at {end} and not be empty, got offset {offset} length {length}")]
        end = offset + length
    if end != num_bytes:
        return [(name, f"must cover all {num_bytes} bytes, cover {end}")]
    return []
