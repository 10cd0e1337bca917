"""Hashes, chunk plans and manifests: what identifies a version's bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings

from meshrl.wire import convert, manifest_checks
from meshrl.wire import manifest as manifests
from meshrl.wire.manifest_file import PayloadReader, from_json, safetensors_header, to_json
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

SPECS = (("b", "float32", (3, 5)), ("a", "bfloat16", (7,)), ("empty", "float32", (0, 4)), ("s", "int64", ()))


def build(stream: bytes) -> Manifest:
    tensors, chunks = manifests.entries_of(memoryview(stream), manifests.plan_tensors(SPECS), 4096)
    return manifests.build_manifest(
        run_id="run", epoch=1, version=2, transport=Transport.STREAM, tensors=tensors, chunks=chunks
    )


STREAM = bytes(range(8 + 60 + 14))


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(st.lists(st.integers(0, 9000), max_size=6), st.integers(4096, 9000))
def test_hashes_are_those_of_the_spans_on_threads_too(sizes: list[int], chunk_bytes: int) -> None:
    plans = manifests.plan_tensors([(f"t{index}", "uint8", (size,)) for index, size in enumerate(sizes)])
    stream = np.random.default_rng(0).bytes(sum(sizes))
    with ThreadPoolExecutor(3) as threads:
        tensors, chunks = manifests.entries_of(memoryview(stream), plans, chunk_bytes, each=threads.map)
    assert (tensors, chunks) == manifests.entries_of(memoryview(stream), plans, chunk_bytes)
    for spanned in (tensors, chunks):
        lengths = [each.num_bytes if isinstance(each, TensorEntry) else each.length for each in spanned]
        assert sum(lengths) == len(stream)
        for each, length in zip(spanned, lengths, strict=True):
            assert each.digest == blake3.blake3(stream[each.offset : each.offset + length]).digest()


@pytest.mark.parametrize("stream", [STREAM[:-1], STREAM + b"a"])
def test_stream_that_is_too_short_or_too_long_is_an_error(stream: bytes) -> None:
    with pytest.raises(ValueError, match=f"has {len(stream)} bytes, its plan {len(STREAM)}"):
        manifests.entries_of(memoryview(stream), manifests.plan_tensors(SPECS), 4096)


def test_artifact_id_depends_on_the_base_of_a_delta() -> None:
    """On all else by the vectors of the contract, which have no delta."""
    one = build(STREAM)
    changes = {"base_version": 0, "base_root": b"x"}
    ids = {manifests.artifact_id(dataclasses.replace(one, **{name: value})) for name, value in changes.items()}
    assert len(ids | {manifests.artifact_id(one)}) == len(changes) + 1


def test_json_round_trip_and_damage_is_noticed() -> None:
    manifest = build(STREAM)
    assert from_json(to_json(manifest)) == manifest
    with pytest.raises(ValueError, match="damaged"):
        from_json(to_json(manifest).replace(b'"version":2', b'"version":3'))
    with pytest.raises(ValueError, match="not a manifest"):
        from_json(b"{}")


def test_manifest_that_disagrees_with_itself_is_told_every_field() -> None:
    good = build(STREAM)
    assert manifest_checks.violations(good, max_chunk_bytes=4096) == []
    bad = dataclasses.replace(good, result_root=b"x", layout_signature=b"y", chunks=())
    fields = [field for field, _ in manifest_checks.violations(bad, max_chunk_bytes=4096)]
    assert fields == ["result_root", "layout_signature", "chunks"]
    gap = (dataclasses.replace(good.tensors[0], offset=8), *good.tensors[1:])
    assert manifest_checks.violations(dataclasses.replace(good, tensors=gap), max_chunk_bytes=4096) == [
        ("tensors[0].offset", "must be 0, got 8: tensors follow without gaps")
    ]
    assert manifest_checks.violations(good, max_chunk_bytes=50)[0][0] == "chunks[0].length"


SUMS = tuple(
    TensorEntry(name=p.name, dtype=p.dtype, shape=p.shape, offset=p.offset, num_bytes=p.num_bytes, digest=b"s" * 16)
    for p in manifests.plan_tensors((*SPECS, ("flags", "uint8", (3,))))
)


def collective(**changes: Any) -> Manifest:
    made = manifests.build_manifest(
        run_id="run",
        epoch=1,
        version=2,
        transport=Transport.NCCL,
        tensors=SUMS,
        chunks=(),
        collective=CollectivePlan(num_senders=2, bucket_bytes=64, whole_tensors=(4,)),
    )
    return dataclasses.replace(made, **changes)


def plan(**changes: Any) -> CollectivePlan:
    return dataclasses.replace(CollectivePlan(num_senders=2, bucket_bytes=64, whole_tensors=(4,)), **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"collective": None}, "collective"),
        ({"digest_algorithm": "blake3"}, "tensors[0].digest"),
        ({"digest_algorithm": "md5"}, "digest_algorithm"),
        ({"chunks": build(STREAM).chunks}, "chunks"),
        ({"collective": plan(num_senders=0)}, "collective.num_senders"),
        ({"collective": plan(bucket_bytes=0)}, "collective.bucket_bytes"),
        ({"collective": plan(whole_tensors=(4, 5))}, "collective.whole_tensors"),
        ({"collective": plan(whole_tensors=(4, 4))}, "collective.whole_tensors"),
        ({"collective": plan(whole_tensors=())}, "collective.whole_tensors"),
        ({"collective": plan(row_order=(1, 0))}, "collective.row_order"),
        ({"collective": plan(reordered_tensors=(2,))}, "collective.row_order"),
        ({"collective": plan(reordered_tensors=(2,), row_order=(1, 1))}, "collective.row_order"),
        ({"collective": plan(reordered_tensors=(0,), row_order=(1, 0))}, "collective.reordered_tensors"),
        ({"collective": plan(reordered_tensors=(4,), row_order=(1, 0))}, "collective.reordered_tensors"),
        ({"collective": plan(reordered_tensors=(9,), row_order=(1, 0))}, "collective.reordered_tensors"),
    ],
)
def test_collective_manifest_must_say_how_it_is_sent(changes: Mapping[str, Any], field: str) -> None:
    assert manifest_checks.violations(collective(), max_chunk_bytes=4096) == []
    found = manifest_checks.violations(collective(**changes), max_chunk_bytes=4096)
    assert [name for name, _ in found] == [field]


def test_an_order_of_rows_is_part_of_what_a_manifest_is() -> None:
    ordered = collective(collective=plan(reordered_tensors=(2,), row_order=(1, 0)))
    assert manifest_checks.violations(ordered, max_chunk_bytes=4096) == []
    assert from_json(to_json(ordered)) == ordered
    assert convert.from_proto(Manifest, convert.to_proto(ordered)) == ordered
    assert manifests.artifact_id(ordered) != manifests.artifact_id(collective())


def test_one_sender_may_send_any_type_in_pieces() -> None:
    alone = collective(collective=plan(num_senders=1, whole_tensors=()))
    assert manifest_checks.violations(alone, max_chunk_bytes=4096) == []


@pytest.mark.parametrize(
    ("transport", "fields"),
    [(Transport.STREAM, ["collective", "chunks"]), (Transport.FILESYSTEM, ["collective", "chunks", "files"])],
)
def test_only_nccl_has_senders(transport: Transport, fields: list[str]) -> None:
    found = manifest_checks.violations(collective(transport=transport), max_chunk_bytes=4096)
    assert [field for field, _ in found] == fields


def test_delta_says_what_it_leads_from_and_travels_in_chunks_of_its_own() -> None:
    base = collective(transport=Transport.STREAM, collective=None)
    delta = manifests.delta_manifest(
        base, dataclasses.replace(base, version=3), manifests.chunks_of(memoryview(b"abc" * 99), 4096)
    )
    assert (delta.payload_bytes, delta.base_version, delta.base_root) == (297, 2, base.result_root)
    assert manifest_checks.violations(delta, max_chunk_bytes=4096) == []
    assert from_json(to_json(delta)) == delta
    for changes, field in (
        ({"base_version": None}, "base_root"),
        ({"base_root": b""}, "base_root"),
        ({"codec": "raw"}, "codec"),
        ({"transport": Transport.FILESYSTEM}, "kind"),
        ({"kind": VersionKind.FULL}, "base_root"),
    ):
        found = manifest_checks.violations(dataclasses.replace(delta, **changes), max_chunk_bytes=4096)
        assert found[0][0] == field


def test_delta_by_broadcast_lists_what_each_sender_sends() -> None:
    streams = [b"abc" * 99, b"d" * 17]
    offsets = (0, len(streams[0]))
    chunks = tuple(
        ChunkEntry(offset=offset, length=len(stream), digest=manifests.digest(memoryview(stream)))
        for offset, stream in zip(offsets, streams, strict=True)
    )
    delta = manifests.delta_manifest(collective(), collective(version=3), chunks)
    assert (delta.transport, delta.payload_bytes) == (Transport.NCCL, 314)
    assert manifest_checks.violations(delta, max_chunk_bytes=16) == []  # no chunk goes through the hub
    assert from_json(to_json(delta)) == delta
    for changes in (
        {"chunks": chunks[:1]},
        {"chunks": (chunks[0], dataclasses.replace(chunks[1], offset=299))},
        {"chunks": (chunks[0], dataclasses.replace(chunks[1], digest=b"short"))},
    ):
        found = manifest_checks.violations(dataclasses.replace(delta, **changes), max_chunk_bytes=4096)
        assert [name.partition("[")[0] for name, _ in found] == ["chunks"]


def test_adapter_version_carries_its_own_tensors_and_the_layout_of_its_base() -> None:
    base = build(STREAM)
    adapter = AdapterConfig(rank=4, lora_alpha=8.0, target_modules=("q_proj",))
    lora = manifests.build_manifest(
        run_id="run",
        epoch=1,
        version=2,
        transport=Transport.STREAM,
        tensors=base.tensors,
        chunks=base.chunks,
        adapter=manifests.Adapter(config=adapter, base_layout=b"l" * 32),
    )
    assert (lora.kind, lora.layout_signature) == (VersionKind.LORA, b"l" * 32)
    assert manifest_checks.violations(lora, max_chunk_bytes=4096) == []
    assert from_json(to_json(lora)) == lora
    for changes, field in (
        ({"adapter": None}, "adapter"),
        ({"kind": VersionKind.FULL}, "adapter"),
        ({"adapter": dataclasses.replace(adapter, rank=0)}, "adapter.rank"),
        ({"layout_signature": b"short"}, "layout_signature"),
    ):
        found = manifest_checks.violations(dataclasses.replace(lora, **changes), max_chunk_bytes=4096)
        assert [name for name, _ in found] == [field]


def test_files_are_safetensors_that_others_can_read(tmp_path: Path) -> None:
    plans = manifests.plan_tensors([("b", "float32", (3, 5)), ("s", "int64", (2,))])
    values = {"b": np.arange(15, dtype=np.float32).reshape(3, 5), "s": np.array([5, -7])}
    payload = b"".join(values[plan.name].tobytes() for plan in plans)
    path = tmp_path / "weights.safetensors"
    header = safetensors_header(plans, {"format": "pt"})
    path.write_bytes(header + payload)
    loaded = safetensors.numpy.load_file(path)
    assert {name: array.tolist() for name, array in loaded.items()} == {n: v.tolist() for n, v in values.items()}
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}
    with PayloadReader((FileEntry(path=str(path), offset=0, num_bytes=len(payload)),)) as reader:
        assert reader.read(10, 20) == payload[10:30]


def test_payload_may_be_spread_over_files(tmp_path: Path) -> None:
    for index, part in enumerate((b"header-abcd", b"efghij")):
        (tmp_path / str(index)).write_bytes(part)
    files = (
        FileEntry(path=str(tmp_path / "0"), offset=0, num_bytes=4),
        FileEntry(path=str(tmp_path / "1"), offset=4, num_bytes=6),
    )
    with PayloadReader(files) as reader:
        assert reader.read(0, 10) == b"abcdefghij"
        assert reader.read(3, 3) == b"def"
        (tmp_path / "1").write_bytes(b"ef")
        with pytest.raises(OSError, match="ended at byte"):
            reader.read(4, 6)
    with pytest.raises(OSError, match="shorter"):
        PayloadReader(files)
