"""Deltas: any two images of weights lead to each other, to the bit, and what is damaged on the way is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.deltas.codec import (
    DeltaError,
    Rows,
    batches,
    encode,
    merge,
    read_stream,
    runs_of,
    unpack,
    write_stream,
)
from meshrl.versions.deltas.image import WeightImage
from meshrl.versions.deltas.on_device import decode_on_device, encode_on_device
from meshrl.versions.deltas.words import UNSIGNED, from_ordered, ordered, unzigzag, zigzag
from meshrl.versions.files import HostBytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import layout_signature, plan_tensors, result_root
from meshrl.wire.types import Manifest, TensorEntry, Transport, VersionKind

SHAPES = (
    ("norm", "float32", (5,)),
    ("embed", "bfloat16", (7, 9)),
    ("head", "float16", (3, 11)),
    ("empty", "bfloat16", (0, 4)),
    ("experts", "float8_e4m3", (3, 5)),
    ("scales", "float8_e5m2", (9,)),
    ("steps", "int64", (2,)),
)
PLAN = plan_tensors(SHAPES)
SIZE = sum(entry.num_bytes for entry in PLAN)
IMAGES = st.binary(min_size=SIZE, max_size=SIZE).map(lambda data: np.frombuffer(data, dtype=np.uint8))


CUTS = pytest.mark.parametrize("cut", [(2**22, 2**20, 2**17, 400), (16, 2**20, 7, 1), (5, 20, 3, 2)])
"""Elements of a piece, changes that are decoded at once, words whose terms are computed at once, at most; and elements
for each that changes, from which on gaps have low bytes of their own."""


@contextmanager
def cut_into(cut: tuple[int, int, int, int]) -> Iterator[None]:
    """Cuts what the test does into parts of these sizes."""
    with pytest.MonkeyPatch.context() as patched:
        names = ("codec.BLOCK_VALUES", "codec.BATCH_CHANGES", "digests.TILE_WORDS", "codec.SPARSE")
        for name, size in zip(names, cut, strict=True):
            patched.setattr(f"meshrl.versions.deltas.{name}", size)
        yield


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def digested(image: NDArray[np.uint8]) -> tuple[TensorEntry, ...]:
    return tuple(
        replace(
            entry,
            digest=digest_bytes(sum128(torch.from_numpy(image[entry.offset : entry.offset + entry.num_bytes].copy()))),
        )
        for entry in PLAN
    )


def manifest_of(version: int, image: NDArray[np.uint8], base: Manifest | None = None) -> Manifest:
    tensors = digested(image)
    return Manifest(
        run_id="r", epoch=1, version=version, transport=Transport.STREAM, tensors=tensors, chunks=(),
        kind=VersionKind.FULL if base is None else VersionKind.DELTA,
        base_version=None if base is None else base.version, base_root=b"" if base is None else base.result_root,
        result_root=result_root(tensors), layout_signature=layout_signature(SHAPES), digest_algorithm="sum128",
    )  # fmt: skip


def image_of(manifest: Manifest, image: NDArray[np.uint8]) -> WeightImage:
    return WeightImage(manifest, HostBytes(parts=((0, image.copy()),)), num_threads=2)


def delta(old: NDArray[np.uint8], new: NDArray[np.uint8], threads: ThreadPoolExecutor) -> NDArray[np.uint8]:
    return write_stream([packed for _, packed in encode(Rows(PLAN), old, new, threads)])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_neighbours_in_the_order_are_one_step_apart_and_every_pattern_comes_back(width: int) -> None:
    dtype = UNSIGNED[width]
    words = np.random.default_rng(0).integers(0, 2 ** (8 * width), 2000, dtype=np.uint64).astype(dtype)
    words[:4] = [0, 1 << (8 * width - 1), (1 << (8 * width)) - 1, (1 << (8 * width - 1)) - 1]
    assert (from_ordered(ordered(words)) == words).all()
    assert (unzigzag(zigzag(words)) == words).all()
    zero, minus_zero = ordered(words[:1]), ordered(words[1:2])
    assert int(zero[0]) - int(minus_zero[0]) == 1
    if width == 4:
        floats = words.view("<f4")
        rising = np.sort(floats[~np.isnan(floats) & (floats != 0.0)]).view("<u4")  # which zero sorts first, CPUs choose
        assert (np.diff(ordered(rising).astype(np.int64)) >= 0).all()


@CUTS
@settings(max_examples=30, deadline=None)
@given(old=IMAGES, new=IMAGES)
def test_a_delta_leads_to_any_bit_patterns_and_back(
    old: NDArray[np.uint8], new: NDArray[np.uint8], cut: tuple[int, int, int, int], threads: ThreadPoolExecutor
) -> None:
    before = manifest_of(1, old)
    after = manifest_of(2, new, before)
    image = image_of(before, old)
    try:
        with cut_into(cut):
            image.apply(after, delta(old, new, threads))
            assert image.held.parts[0][1].tobytes() == new.tobytes()
            assert image.root == after.result_root
            image.apply(manifest_of(3, old, after), delta(new, old, threads))
        assert image.held.parts[0][1].tobytes() == old.tobytes()
        assert image.root == before.result_root
    finally:
        image.close()


def test_pieces_that_are_decoded_together_make_the_same_changes_and_must_each_hold_their_own(
    threads: ThreadPoolExecutor,
) -> None:
    random = np.random.default_rng(2)
    plan = plan_tensors([("a", "bfloat16", (4000,))])
    old = random.integers(0, 2**16, 4000, dtype=np.uint16)
    new = old.copy()
    new[[0, 999, 1700, 3999]] ^= np.uint16(0x81)
    new[2000:2600] = random.integers(0, 2**16, 600, dtype=np.uint16)  # big steps, which no byte holds
    with cut_into((1000, 2**20, 7, 400)):
        pieces = [packed for _, packed in encode(Rows(plan), old.view(np.uint8), new.view(np.uint8), threads)]
    assert [len(batch) for batch in batches(pieces)] == [4]
    together, alone = unpack(*pieces), [unpack(piece) for piece in pieces]
    places = [each.places + (each.run.start - together.run.start) // 2 for each in alone]
    assert together.places.tolist() == np.concatenate(places).tolist() == np.flatnonzero(old != new).tolist()
    assert together.steps.tolist() == np.concatenate([each.steps for each in alone]).tolist()
    first, second = pieces[:2]
    assert (first.changed, second.changed) == (2, 1)
    swapped = [
        replace(
            gaps, changed=steps.changed, raw=(gaps.raw[0], *steps.raw[1:]), frames=(gaps.frames[0], *steps.frames[1:])
        )
        for gaps, steps in ((first, second), (second, first))
    ]
    with pytest.raises(DeltaError, match="does not hold the 1 changes"):  # as many in all
        unpack(*swapped)
    with pytest.raises(DeltaError, match="beyond its 900"):
        unpack(replace(first, run=replace(first.run, values=900)), second)
    damaged = replace(first, frames=(b"no frame", *first.frames[1:]))
    for decode in (unpack, lambda piece: list(decode_on_device([piece], torch.device("cpu"), 2))):
        with pytest.raises(DeltaError, match="cannot be decompressed"):
            decode(damaged)


def test_few_changes_spread_evenly_take_less_than_a_two_thousandth_and_come_back_beside_many(
    threads: ThreadPoolExecutor,
) -> None:
    random, values, many = np.random.default_rng(3), 2**22, 5000
    plan = plan_tensors([("a", "bfloat16", (values,)), ("b", "bfloat16", (many,))])
    old = random.integers(0, 2**16, values + many, dtype=np.uint16)
    places = np.flatnonzero(random.random(values) < 0.0005)
    places[:2] = 0, 70_000  # the first element, and a gap of which no two bytes hold the rest
    places = np.unique(places[(places == 0) | (places >= 70_000)])
    steps = random.choice([1, -1], len(places)) * random.choice([1, 2], len(places), p=[0.94, 0.06])
    new = old.copy()
    new[places] = from_ordered(ordered(old[places]) + steps.astype(np.uint16))
    sparse = [packed for _, packed in encode(Rows(plan), old.view(np.uint8), new.view(np.uint8), threads)]
    assert len(write_stream(sparse)) * 2000 < 2 * values
    new[values:] = random.permutation(new[values:])
    with cut_into((2**20, 2**20, 2**17, 400)):
        pairs = encode(Rows(plan), old.view(np.uint8), new.view(np.uint8), threads)
        stream = write_stream([packed for _, packed in pairs])
        made = encode_on_device(Rows(plan), *(torch.from_numpy(w.view(np.uint8).copy()) for w in (old, new)), threads)
    assert write_stream(made).tobytes() == stream.tobytes()
    pieces = read_stream(stream)
    assert [len(piece.lows) > 0 for piece in pieces] == [True] * 4 + [False]
    found = unpack(*pieces)
    assert found.places.tolist() == np.flatnonzero(old != new).tolist()
    [(_, at_C, steps_C)] = decode_on_device(pieces, torch.device("cpu"), 2)
    assert at_C.tolist() == found.places.tolist()
    assert steps_C.tolist() == found.steps.view(np.int16).tolist()
    with pytest.raises(DeltaError, match="makes no sense"):
        read_stream(stream[:-1])
    as_before = stream.copy()
    as_before[4] = 1  # the format without low bytes
    with pytest.raises(DeltaError, match="row 0 of the table of pieces makes no sense"):
        read_stream(as_before)
    beyond = replace(pieces[0], lows=bytes([255]) * pieces[0].changed)
    with pytest.raises(DeltaError, match="beyond its"):
        unpack(beyond)


def test_a_reader_of_the_older_format_gets_no_low_bytes_also_from_merged_deltas(threads: ThreadPoolExecutor) -> None:
    plan, values = plan_tensors([("a", "bfloat16", (2**16,))]), 2**16
    images = [np.zeros(values, np.uint16)]
    for at in (5, 60_000):
        images.append(images[-1].copy())
        images[-1][at] += 1
    for sparse, form in ((True, 2), (False, 1)):
        streams = []
        for old, new in pairwise(image.view(np.uint8) for image in images):
            pairs = encode(Rows(plan), old, new, threads, sparse=sparse)
            streams.append(write_stream([packed for _, packed in pairs]))
            tensors = [torch.from_numpy(image.copy()) for image in (old, new)]
            made = encode_on_device(Rows(plan), tensors[0], tensors[1], threads, sparse=sparse)
            assert write_stream(made).tobytes() == streams[-1].tobytes()
        assert [int(stream[4]) for stream in (*streams, merge(streams))] == [form] * 3
        assert unpack(*read_stream(merge(streams))).places.tolist() == [0, 59_995]  # the piece begins at the first


@pytest.mark.parametrize(("block", "sparse"), [(16, 400), (2**22, 1), (2**22, 400), (5, 2)])
@settings(max_examples=30, deadline=None)
@given(old=IMAGES, new=IMAGES)
def test_tensors_on_a_device_give_the_same_bytes(
    old: NDArray[np.uint8], new: NDArray[np.uint8], block: int, sparse: int, threads: ThreadPoolExecutor
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("meshrl.versions.deltas.codec.SPARSE", sparse)
        patched.setattr("meshrl.versions.deltas.codec.BLOCK_VALUES", block)
        patched.setattr("meshrl.versions.deltas.on_device.AREA_VALUES", 4 * block)
        patched.setattr("meshrl.versions.deltas.on_device.AREA_CHANGES", block)
        tensors = [torch.from_numpy(image.copy()) for image in (old, new)]
        made = encode_on_device(Rows(PLAN), tensors[0], tensors[1], threads)
        assert write_stream(made).tobytes() == delta(old, new, threads).tobytes()


@settings(max_examples=15, deadline=None)
@given(images=st.lists(IMAGES, min_size=3, max_size=5))
def test_one_delta_does_what_several_do(images: list[NDArray[np.uint8]], threads: ThreadPoolExecutor) -> None:
    first, last = images[0], images[-1]
    steps = [delta(old, new, threads) for old, new in pairwise(images)]
    before = manifest_of(1, first)
    image = image_of(before, first)
    try:
        image.apply(manifest_of(len(images), last, before), merge(steps))
        assert image.held.parts[0][1].tobytes() == last.tobytes()
    finally:
        image.close()
    assert merge([delta(first, last, threads), delta(last, first, threads)]).tobytes() == write_stream([]).tobytes()


def test_changes_far_apart_and_many_blocks_are_encoded(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.versions.deltas.codec.BLOCK_VALUES", 1000)
    plan = plan_tensors([("a", "bfloat16", (3, 1001)), ("b", "float32", (17,)), ("c", "bfloat16", (1,))])
    size = sum(entry.num_bytes for entry in plan)
    old = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    new[[0, 68, 69, 900, size - 2, size - 1]] ^= np.uint8(0x81)
    assert sum(run.values * run.width for run in Rows(plan).runs) == size
    pieces = read_stream(write_stream([packed for _, packed in encode(Rows(plan), old, new, threads)]))
    assert sum(piece.changed for piece in pieces) == 4
    assert [run.values for run in runs_of(plan, [(0, 68), (68, 2200)])] == [17, 1000, 100]


@CUTS
@settings(max_examples=60, deadline=None)
@given(old=IMAGES, new=IMAGES, data=st.data())
def test_a_flipped_bit_of_a_delta_or_of_the_image_is_refused_and_changes_nothing(
    old: NDArray[np.uint8],
    new: NDArray[np.uint8],
    data: st.DataObject,
    cut: tuple[int, int, int],
    threads: ThreadPoolExecutor,
) -> None:
    before = manifest_of(1, old)
    after = manifest_of(2, new, before)
    with cut_into(cut):
        stream = delta(old, new, threads).copy()
    image = image_of(before, old)
    held = image.held.parts[0][1]
    try:
        image.wait_until_hashed()
        where = data.draw(st.sampled_from(["delta", "image"]))
        target = stream if where == "delta" else held
        at, bit = data.draw(st.integers(0, len(target) - 1)), data.draw(st.integers(0, 7))
        target[at] ^= np.uint8(1 << bit)
        as_it_was = held.tobytes()
        refused = None
        try:
            with cut_into(cut):
                image.apply(after, stream)
        except MeshError as error:
            refused = error.reason
        if refused is None:  # a bit of a frame's header that says nothing about its content
            assert where == "delta"
            assert held.tobytes() == new.tobytes()
        else:
            assert refused is Reason.DIGEST_MISMATCH
            assert held.tobytes() == as_it_was
            assert image.root == before.result_root
    finally:
        image.close()


@CUTS
@settings(max_examples=15, deadline=None)
@given(old=IMAGES, new=IMAGES)
def test_a_delta_is_applied_as_it_arrives_and_nothing_is_read_before_it_is_here(
    old: NDArray[np.uint8], new: NDArray[np.uint8], cut: tuple[int, int, int, int], threads: ThreadPoolExecutor
) -> None:
    before = manifest_of(1, old)
    after, image = manifest_of(2, new, before), image_of(before, old)
    try:
        with cut_into(cut):
            whole = delta(old, new, threads)
            arriving, ends = np.full_like(whole, 0xFF), list[int]()

            def arrive(end: int) -> None:
                arriving[:end] = whole[:end]
                ends.append(end)

            def break_off(end: int) -> None:
                arrive(end)
                if end == len(whole):
                    raise MeshError(Reason.UNREACHABLE, "the rest did not come")

            with pytest.raises(MeshError, match="the rest did not come"):
                image.apply(after, arriving, break_off)
            assert (image.held.parts[0][1].tobytes(), image.root) == (old.tobytes(), before.result_root)
            arriving[:] = 0xFF
            image.apply(after, arriving, arrive)
            assert image.held.parts[0][1].tobytes() == new.tobytes()
            assert max(ends) == len(whole)
    finally:
        image.close()


@given(noise=st.binary(max_size=200))
def test_bytes_that_are_no_delta_are_refused(noise: bytes) -> None:
    with pytest.raises(DeltaError):
        read_stream(np.frombuffer(noise, dtype=np.uint8))


def test_a_delta_for_other_weights_is_refused(threads: ThreadPoolExecutor) -> None:
    images = [np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8) for seed in range(3)]
    manifests = [manifest_of(1, images[0])]
    manifests.append(manifest_of(2, images[1], manifests[0]))
    image = image_of(manifests[0], images[0])
    try:
        image.apply(manifests[1], delta(images[0], images[1], threads))
        with pytest.raises(MeshError, match="for other weights"):  # twice is once too often
            image.apply(manifests[1], delta(images[0], images[1], threads))
        assert image.root == manifests[1].result_root
        image.check()
    finally:
        image.close()


def test_tensors_that_do_not_change_cost_no_bytes() -> None:
    source = np.random.default_rng(0)
    plan = plan_tensors([(f"expert.{number:03}", "bfloat16", (2**16,)) for number in range(64)])
    old = source.integers(0, 2**16, 64 * 2**16).astype(np.uint16)
    touched = np.repeat(np.arange(64) % 8 == 3, 2**16)
    with ThreadPoolExecutor(1) as threads:

        def size(changed: NDArray[np.bool_]) -> int:
            new = old + np.where(changed, source.choice([1, 65535], len(old)), 0).astype(np.uint16)
            pairs = encode(Rows(plan), old.view(np.uint8), new.view(np.uint8), threads)
            return len(write_stream([packed for _, packed in pairs]))

        assert size(np.zeros(len(old), dtype=bool)) == len(write_stream([])) < 32
        share = size((source.random(len(old)) < 0.004) & touched) / (2 * len(old))  # 0.05% of all, in an eighth of them
    assert share < 1 / 2000
