"""Deltas and versions in the parameters of an engine on a GPU: the bits and the digests of a CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.held_parts import HeldParts
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.collective.scatter import message, pack
from meshrl.versions.deltas.codec import Rows, encode, write_stream
from meshrl.versions.placement import WeightPlacement, check_parts
from meshrl.versions.snapshot import whole_snapshot
from meshrl.versions.transports.base import VersionLine
from meshrl.wire.manifest import SUM128, plan_tensors
from meshrl.wire.types import CollectivePlan, Transport
from placed_engine import PlacedRank, manifest_of, placement_of, plan_for, snapshots_of, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("share", [0.02, 0.9])
def test_a_delta_in_place_has_the_bits_of_a_cpu(ranks: int, share: float) -> None:
    torch.manual_seed(0)
    old = state_of(0)
    words = {name: tensor.view(torch.int16) for name, tensor in old.items()}
    new = {
        name: torch.where(torch.rand(word.shape) < share, word + torch.randint(-9, 9, word.shape).short(), word)
        for name, word in words.items()
    }
    before, after = (whole_snapshot({n: t.view(old[n].dtype) for n, t in state.items()}) for state in (words, new))
    tensors = tuple(replace(entry, digest=digest_bytes(sum128(new[entry.name]))) for entry in after.tensors)
    line = VersionLine(run_id="run", epoch=1)
    manifest = line.manifest(2, Transport.STREAM, tensors, digest_algorithm=SUM128)
    parts = []
    with ThreadPoolExecutor(2) as threads:
        made = encode(Rows(manifest.tensors), before.flat.numpy(), after.flat.numpy(), threads)
    delta = write_stream([packed for _, packed in made])
    for rank in range(ranks):
        engine = PlacedRank(rank, ranks)
        placement = placement_of(engine, old)
        on_gpu = {name: parameter.cuda() for name, parameter in engine.parameters.items()}
        placement.patch(manifest, delta, engine.parameters, 2)
        placement.patch(manifest, delta, on_gpu, 2)
        for name, parameter in engine.parameters.items():
            assert torch.equal(on_gpu[name].cpu().view(torch.int16), parameter.view(torch.int16)), name
        assert placement.digests(on_gpu) == placement.digests(engine.parameters)
        parts.append(placement.digests(on_gpu))
    check_parts(manifest, parts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("senders", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
@pytest.mark.parametrize("scattered", [False, True])
def test_parts_that_arrive_in_buckets_are_those_of_a_cpu(
    ranks: int, senders: int, bucket_bytes: int, scattered: bool
) -> None:
    engines = [PlacedRank(rank, ranks) for rank in range(ranks)]
    placements = [placement_of(engine, state_of(0)) for engine in engines]
    on_gpu = [{name: each.cuda() for name, each in engine.parameters.items()} for engine in engines]
    held: list[HeldParts] = []
    for seed in (1, 2, 3):
        state, digests = state_of(seed), []
        plan = plan_for(state, senders, bucket_bytes)
        snapshots = snapshots_of(state, plan)
        held = held or [HeldParts(plan, placement, scattered=scattered) for placement in placements]
        for engine, placement, parameters, parts in zip(engines, placements, on_gpu, held, strict=True):
            size = max(map(sum, parts.sizes))
            buffers = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
            parts.open(buffers, parameters)
            for turn, bucket in enumerate(plan.buckets):
                flat, at = buffers[turn % 2][: sum(parts.sizes[turn])], 0
                for sender, num_bytes in enumerate(parts.sizes[turn]):
                    sent = torch.empty(num_bytes, dtype=torch.uint8)
                    if scattered:
                        pack([message(plan.tensors, bucket, sender, placement.moves)], snapshots[sender].flat, sent)
                    else:
                        sent.copy_(snapshots[sender].flat[slice(*bucket.spans[sender])])
                    flat[at : at + num_bytes] = sent.cuda()
                    at += num_bytes
                parts.take(turn, flat, parameters)
            digests.append(parts.digests(parameters))
            engine.load(state)
            for name, parameter in engine.parameters.items():
                assert torch.equal(parameters[name].cpu(), parameter), name
        check_parts(manifest_of(plan), digests)


def test_a_tensor_that_a_rank_holds_twice_counts_once() -> None:
    tensors = {"a": torch.randn(6, 4).bfloat16()}
    parameters = {name: torch.zeros(6, 4, dtype=torch.bfloat16, device="cuda") for name in ("p", "q")}
    moves = {name: moves[0] for name, moves in WeightPlacement.whole(tensors).moves.items()}
    placement = WeightPlacement([replace(moves["a"], parameter=name) for name in parameters])
    plan = PublishPlan(
        tensors=plan_tensors([("a", "bfloat16", (6, 4))]), collective=CollectivePlan(num_senders=2, bucket_bytes=100)
    )
    held = HeldParts(plan, placement, scattered=False)  # a half from each sender
    bucket = tensors["a"].reshape(-1).view(torch.uint8).cuda()
    held.open([bucket, bucket], parameters)
    held.take(0, bucket, parameters)
    assert all(torch.equal(parameter.cpu(), tensors["a"]) for parameter in parameters.values())
    assert held.digests(parameters) == WeightPlacement.whole(tensors).digests(tensors)
