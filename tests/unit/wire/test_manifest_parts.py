"""A manifest in parts, of a tenth of the size that a model of 10^12 parameters has."""

from dataclasses import replace

import pytest

from meshrl.wire import convert
from meshrl.wire.types import ChunkEntry, Manifest, TensorEntry, Transport

PARAMETERS = 10**11
TENSORS = 7_000
CHUNK = 4 * 2**20
DEFAULT_LIMIT = 4 * 2**20
"""Of gRPC, for messages where nobody sets another."""


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Of bfloat16 weights: tensors of an expert model's names, and chunks of 4 MiB."""
    each = 2 * PARAMETERS // TENSORS // 2 * 2
    tensors = tuple(
        TensorEntry(
            name=f"model.layers.{index // 1200}.mlp.experts.{index % 400}.gate_proj.weight",
            dtype="bfloat16",
            shape=(each // 2,),
            offset=index * each,
            num_bytes=each,
            digest=index.to_bytes(32, "little"),
        )
        for index in range(TENSORS)
    )
    total = each * TENSORS
    chunks = tuple(
        ChunkEntry(offset=offset, length=min(CHUNK, total - offset), digest=offset.to_bytes(32, "little"))
        for offset in range(0, total, CHUNK)
    )
    return Manifest(
        run_id="main", epoch=1, version=7, transport=Transport.STREAM, result_root=b"r" * 32,
        layout_signature=b"l" * 32, tensors=tensors, chunks=chunks,
    )  # fmt: skip


def test_each_part_fits_grpcs_own_limit_and_together_they_are_the_manifest(manifest: Manifest) -> None:
    size = convert.manifest_size(manifest)
    assert (size.num_tensors, size.num_chunks) == (7_000, 47_684)
    assert (
        24e5 < size.message_bytes < 40e5
    )  # of ten times as many parameters, one message of 64 MiB has room for a delta of one step, not of two
    header, parts = convert.manifest_header(manifest), list(convert.manifest_parts(manifest))
    assert header.ByteSize() < 200
    sizes = [part.ByteSize() for part in parts]
    assert max(sizes) <= 2**20 < DEFAULT_LIMIT
    assert sum(sizes) == pytest.approx(size.message_bytes, rel=0.01)
    assert len(parts) == pytest.approx(size.message_bytes / 2**20, abs=1)
    assert convert.manifest_of(header, parts) == manifest


def test_a_small_manifest_is_one_part_and_an_empty_one_none(manifest: Manifest) -> None:
    small = replace(manifest, tensors=manifest.tensors[:2], chunks=())
    (part,) = convert.manifest_parts(small)
    assert convert.manifest_of(convert.manifest_header(small), [part]) == small
    assert list(convert.manifest_parts(replace(small, tensors=()))) == []
