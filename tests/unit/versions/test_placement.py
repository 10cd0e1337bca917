"""Deltas onto an engine's fused and divided parameters: the bits of the version in full, each rank its own parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshrl.versions.collective.digest import digest_bytes, sum128, sum128_at, sum128_rows
from meshrl.versions.deltas.codec import Rows, encode, write_stream
from meshrl.versions.placement import PlacementTracer, check_parts
from meshrl.versions.snapshot import whole_snapshot
from meshrl.versions.transports.base import VersionLine
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import SUM128
from meshrl.wire.types import Manifest, Transport
from placed_engine import PlacedRank as Engine
from placed_engine import State, placement_of, state_of, traced


def version_of(state: State, version: int) -> tuple[Manifest, NDArray[np.uint8]]:
    whole = whole_snapshot(state)
    tensors = tuple(replace(entry, digest=digest_bytes(sum128(state[entry.name]))) for entry in whole.tensors)
    line = VersionLine(run_id="run", epoch=1)
    return line.manifest(version, Transport.STREAM, tensors, digest_algorithm=SUM128), whole.flat.numpy()


def delta_of(old: State, new: State, threads: ThreadPoolExecutor) -> tuple[Manifest, NDArray[np.uint8]]:
    (_, before), (manifest, after) = version_of(old, 1), version_of(new, 2)
    made = encode(Rows(manifest.tensors), before, after, threads)
    return manifest, write_stream([packed for _, packed in made])


def moved(state: State, share: float) -> State:
    """A share of the elements with other bits: some by a unit, some any, some to NaN, infinity or -0."""
    source = np.random.default_rng(3)
    found = {}
    for name, tensor in state.items():
        words = tensor.view(torch.int16).numpy().copy()
        hit = source.random(words.shape) < share
        words[hit] += source.choice([1, -1, 300, -5000], int(hit.sum())).astype(np.int16)
        found[name] = torch.from_numpy(words).view(tensor.dtype).reshape(tensor.shape)
        found[name].view(-1)[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("share", [0.02, 0.9])
def test_a_delta_in_place_has_the_bits_of_the_version_in_full(ranks: int, share: float) -> None:
    old, engines = state_of(0), [Engine(rank, ranks) for rank in range(ranks)]
    placements = [placement_of(engine, old) for engine in engines]
    new = moved(old, share)
    parts = []
    with ThreadPoolExecutor(2) as threads:
        manifest, delta = delta_of(old, new, threads)
        for engine, placement in zip(engines, placements, strict=True):
            placement.patch(manifest, delta, engine.parameters, 2)
            whole = Engine(engine.rank, ranks)
            whole.load(new)
            for name, parameter in engine.parameters.items():
                expected = whole.parameters[name].view(torch.int16)
                assert torch.equal(parameter.view(torch.int16), expected), name
            parts.append(placement.digests(engine.parameters))
    check_parts(manifest, parts)
    assert all(set(found) == set(old) for found in parts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_tensors_are_copied_to_where_loading_put_them(ranks: int) -> None:
    old = state_of(0)
    new = moved(old, 0.5)
    for rank in range(ranks):
        engine, whole = Engine(rank, ranks), Engine(rank, ranks)
        placement = placement_of(engine, old)
        for name, tensor in new.items():
            placement.fill([(name, torch.stack([tensor, tensor])[1])], engine.parameters)
        whole.load(new)
        for name, parameter in engine.parameters.items():
            assert torch.equal(parameter.view(torch.int16), whole.parameters[name].view(torch.int16)), name
        assert set(placement.tensors) == set(old)


def test_one_bit_too_many_on_one_rank_is_found_and_named() -> None:
    state, engines = state_of(0), [Engine(rank, 2) for rank in range(2)]
    placements = [placement_of(engine, state) for engine in engines]
    manifest, _ = version_of(state, 1)
    for tensor, parameter in (("down", "down"), ("norm", "norm"), ("experts", "experts"), ("k", "qkv")):
        words = engines[1].parameters[parameter].view(-1).view(torch.int16)
        words[30 if parameter == "qkv" else 5] ^= 4
        parts = [placement.digests(e.parameters) for placement, e in zip(placements, engines, strict=True)]
        with pytest.raises(MeshError, match=f"'{tensor}'") as refused:
            check_parts(manifest, parts)
        assert refused.value.reason is Reason.DIGEST_MISMATCH
        words[30 if parameter == "qkv" else 5] ^= 4
    with pytest.raises(MeshError):  # a rank is missing
        check_parts(manifest, parts[:1])


def test_parts_at_even_distances_are_one_move() -> None:
    engine, state = Engine(), {"experts": torch.randn(16, 6, 8).bfloat16()}
    engine.parameters = {"w13": torch.empty(16, 12, 4).bfloat16()}

    def load(engine: Engine, state: State) -> None:
        for expert in range(16):
            for half in range(2):
                engine.parameters["w13"][expert, 6 * half :][:6].copy_(state["experts"][expert][:, 4 * half :][:, :4])

    placement = traced(engine, state, load).placement()
    assert placement is not None
    assert len(placement._moves["experts"]) < 32
    version, _ = version_of(state, 1)
    check_parts(version, [placement.digests(engine.parameters)])
    half = Engine()
    half.parameters = {"w13": torch.empty(16, 6, 8).bfloat16()}
    whole = traced(half, state, lambda e, s: [e.parameters["w13"][i].copy_(s["experts"][i]) for i in range(16)])
    placement = whole.placement()
    assert placement is not None
    assert [(move.shape, move.is_run) for move in placement._moves["experts"]] == [((16 * 48,), True)]
    check_parts(version, [placement.digests(half.parameters)])


def test_what_is_more_than_copies_has_no_placement() -> None:
    state = state_of(0)
    scaled = traced(Engine(), state, lambda engine, tensors: engine.load(tensors, scale=2.0))
    assert scaled.placement() is None
    assert "norm" in scaled.obstacle
    without = traced(Engine(), state, lambda engine, tensors: None)
    assert without.placement() is None
    engine = Engine()
    twice = PlacementTracer(engine.parameters)
    for _ in range(2):
        with twice.sources(list(state.items())):
            engine.load(state)
    assert twice.placement() is None
    assert "twice" in twice.obstacle


def test_a_delta_that_names_elements_beyond_is_refused_before_any_is_changed() -> None:
    state = state_of(0)
    engine = Engine()
    placement = placement_of(engine, state)
    larger = {**state, "z": torch.zeros(5000, dtype=torch.bfloat16)}
    with ThreadPoolExecutor(1) as threads:
        _, delta = delta_of(larger, {**larger, "z": torch.ones(5000, dtype=torch.bfloat16)}, threads)
        before = {name: parameter.clone() for name, parameter in engine.parameters.items()}
        with pytest.raises(MeshError, match="beyond"):
            placement.patch(version_of(state, 2)[0], delta, engine.parameters, 2)
    assert all(torch.equal(before[name], parameter) for name, parameter in engine.parameters.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_digests_of_scattered_elements_add_up_to_the_tensors(dtype: torch.dtype) -> None:
    tensor = torch.randn(77, 12).to(dtype)
    at = torch.arange(tensor.numel()).reshape(77, 12)
    columns = [(tensor[:, a:b].contiguous(), at[:, a:b].reshape(-1)) for a, b in ((0, 5), (5, 12))]
    assert torch.equal(sum(sum128_at(*part) for part in columns), sum128(tensor))
    halves = tensor.itemsize // 2
    runs = [(part.reshape(77, -1), place.reshape(77, -1)[:, 0].numpy().astype(np.uint64)) for part, place in columns]
    assert torch.equal(sum(sum128_rows(part, firsts * np.uint64(halves)) for part, firsts in runs), sum128(tensor))
