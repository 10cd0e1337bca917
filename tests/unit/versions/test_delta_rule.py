"""Which versions leave as deltas."""

from __future__ import annotations

from meshrl.versions.deltas.rule import DeltaRule, FasterWay
from meshrl.wire.manifest import build_manifest
from meshrl.wire.types import Manifest, TensorEntry, Transport

TENSORS = (TensorEntry(name="w", dtype="float32", shape=(2,), offset=0, num_bytes=8, digest=bytes(16)),)


def in_full(version: int) -> Manifest:
    return build_manifest(
        run_id="run", epoch=1, version=version, transport=Transport.STREAM, tensors=TENSORS, chunks=()
    )


def test_no_delta_is_made_of_an_anchor() -> None:
    rule, based = DeltaRule(anchor_every=2), []
    for version in range(7):
        base = rule.base_of(version, TENSORS)
        based.append(None if base is None else base.version)
        full = in_full(version)
        rule.delivered(full if base is None else in_full(version), full)
    assert based == [None, 0, 1, None, 3, 4, None]


def test_deltas_of_most_weights_are_named_once_with_the_key_that_turns_them_off(warned: list[str]) -> None:
    rule = DeltaRule(anchor_every=2)
    for version, delta_bytes in enumerate((60, 600, 167, 170)):
        rule.pays(version, delta_bytes=delta_bytes, changed_bytes=980, num_bytes=1000)
    (line,) = warned
    assert line.startswith("98% of the weights changed with version 2;")
    assert 'weight_broadcast.deltas = "off"' in line


def test_kernels_compiled_with_the_first_versions_make_no_slow_link() -> None:
    way, num_bytes = FasterWay(is_fast=True, again_after=32), 8_044_936_192
    for seconds in (0.29, 1.05, 0.07):  # 4B on an H200 whose Triton cache was empty
        assert way.is_full_faster
        way.took_in_full(seconds, num_bytes)
    assert way.is_full_faster


def test_link_that_is_slow_three_times_gets_deltas() -> None:
    way, found = FasterWay(is_fast=True, again_after=32), []
    for _ in range(4):
        found.append(way.is_full_faster)
        way.took_in_full(4.0, 8_000_000_000)
    assert found == [True, True, True, False]


def test_deltas_that_took_longer_twice_lose_and_one_is_tried_again_after_as_many_in_full() -> None:
    way, found = FasterWay(is_fast=False, again_after=3), []
    way.took_in_full(2.7, 8_000_000_000)
    for _ in range(10):
        found.append(way.is_full_faster)
        if way.is_full_faster:
            way.took_in_full(2.7, 8_000_000_000)
        else:
            way.took_as_delta(18.0)
    assert found == [False, False, True, True, True, False, True, True, True, False]


def test_one_slow_delta_does_not_count() -> None:
    way = FasterWay(is_fast=False, again_after=32)
    way.took_in_full(2.7, 8_000_000_000)
    for seconds in (1.0, 30.0, 1.0, 30.0):
        way.took_as_delta(seconds)
        assert not way.is_full_faster
