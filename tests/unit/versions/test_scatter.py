"""Versions that are scattered over gloo: each rank of an engine gets the parts that it holds, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from meshrl.versions.collective.broadcasting import Receiver, ReceiveTimes, Sender
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.versions.collective.held_parts import HeldParts
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.collective.scatter import Offer, clipped, read_offers, scatter_offers, write_offer
from meshrl.versions.placement import Move, PartDigests, WeightPlacement, check_parts
from meshrl.versions.snapshot import Snapshot, take_snapshot
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import plan_tensors
from meshrl.wire.types import CollectivePlan, JoinGroup
from placed_engine import PlacedRank, State, manifest_of, placement_of, plan_for, snapshots_of, state_of

CPU = torch.device("cpu")
STALL_S = 60.0
MEET_S = 30.0


@dataclass
class Group:
    """Senders and receivers that have met, each on a thread."""

    threads: ThreadPoolExecutor
    senders: list[Sender]
    receivers: list[Receiver]

    def carry(
        self, plan: PublishPlan, snapshots: list[Snapshot], engines: list[PlacedRank]
    ) -> list[tuple[ReceiveTimes, PartDigests]]:
        sending: list[Future[Any]] = [
            self.threads.submit(sender.send, each, stall_s=STALL_S)
            for sender, each in zip(self.senders, snapshots, strict=True)
        ]
        receiving = [
            self.threads.submit(receiver.receive_held, manifest_of(plan), engine.parameters, stall_s=STALL_S)
            for receiver, engine in zip(self.receivers, engines, strict=True)
        ]
        for sent in sending:
            sent.result(STALL_S)
        return [received.result(STALL_S) for received in receiving]


@contextmanager
def group_of(
    placements: list[WeightPlacement | None], num_senders: int, plan: PublishPlan | None, *, ranks_per_engine: int = 2
) -> Iterator[Group]:
    store = open_store("127.0.0.1", deadline_s=MEET_S)
    address = f"127.0.0.1:{store.port}"
    with ThreadPoolExecutor(16) as threads:
        meeting = [
            threads.submit(
                Sender.meet, reach_store(address, deadline_s=MEET_S), generation=1, backend="gloo", sender=sender,
                num_receivers=len(placements), device=CPU, deadline_s=MEET_S, plan=plan,
            )
            for sender in range(num_senders)
        ]  # fmt: skip
        joining = []
        for place, placement in enumerate(placements):
            group = JoinGroup(
                generation=1, store_address=address, backend="gloo", num_senders=num_senders,
                num_receivers=len(placements), first_receiver=place - place % ranks_per_engine, deadline_s=MEET_S,
            )  # fmt: skip
            joining.append(
                threads.submit(Receiver.join, group, index=place % ranks_per_engine, device=CPU, placement=placement)
            )
        made = Group(threads, [one.result(STALL_S) for one in meeting], [one.result(STALL_S) for one in joining])
        yield made
        for each in (*made.senders, *made.receivers):
            each.abort()


def engines_of(num_engines: int = 1, ranks: int = 2) -> tuple[list[PlacedRank], list[WeightPlacement | None]]:
    """Ranks of engines that have loaded a version once, and forgotten it."""
    engines = [PlacedRank(rank, ranks) for _ in range(num_engines) for rank in range(ranks)]
    placements: list[WeightPlacement | None] = [placement_of(engine, state_of(0)) for engine in engines]
    return engines, placements


def holds(engine: PlacedRank, state: State) -> bool:
    whole = PlacedRank(engine.rank, engine.ranks)
    whole.load(state)
    return all(torch.equal(parameter, whole.parameters[name]) for name, parameter in engine.parameters.items())


@pytest.mark.parametrize("num_senders", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_each_rank_of_an_engine_gets_its_parts_and_no_more(num_senders: int, bucket_bytes: int) -> None:
    engines, placements = engines_of()
    with group_of(placements, num_senders, plan_for(state_of(0), num_senders, bucket_bytes)) as group:
        assert all(each.scatters for each in group.senders)
        assert all(each.is_scattered for each in group.receivers)
        for seed in (1, 2):  # buffers are used again
            state = state_of(seed)
            plan = plan_for(state, num_senders, bucket_bytes)
            received = group.carry(plan, snapshots_of(state, plan), engines)
            assert all(holds(engine, state) for engine in engines)
            check_parts(manifest_of(plan), [digests for _, digests in received])
            for times, _ in received:
                assert plan.num_bytes / 2 <= times.num_bytes < 0.75 * plan.num_bytes  # `norm` whole, parts aligned


@pytest.mark.parametrize(("num_senders", "ranks"), [(1, 1), (1, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_ranks_that_know_their_parts_take_them_out_of_a_broadcast(
    num_senders: int, ranks: int, bucket_bytes: int
) -> None:
    engines, placements = engines_of(ranks=ranks)
    with group_of(placements, num_senders, None, ranks_per_engine=ranks) as group:
        assert not any(each.is_scattered for each in group.receivers)
        for seed in (1, 2):
            state = state_of(seed)
            plan = plan_for(state, num_senders, bucket_bytes)
            received = group.carry(plan, snapshots_of(state, plan), engines)
            assert all(holds(engine, state) for engine in engines)
            check_parts(manifest_of(plan), [digests for _, digests in received])
            assert all(times.num_bytes == plan.num_bytes for times, _ in received)


def test_a_bit_that_flips_on_its_way_is_found_and_the_next_version_is_right() -> None:
    engines, placements = engines_of()
    state = state_of(1)
    plan = plan_for(state, 2)
    with group_of(placements, 2, plan) as group:
        snapshots = snapshots_of(state, plan)
        snapshots[1].flat[7] ^= 0x10
        received = group.carry(plan, snapshots, engines)
        with pytest.raises(MeshError) as refused:
            check_parts(manifest_of(plan), [digests for _, digests in received])
        assert refused.value.reason is Reason.DIGEST_MISMATCH
        received = group.carry(plan, snapshots_of(state, plan), engines)
        check_parts(manifest_of(plan), [digests for _, digests in received])
        assert all(holds(engine, state) for engine in engines)


def test_a_rank_that_leaves_in_the_middle_breaks_the_group_for_all() -> None:
    engines, placements = engines_of()
    state = state_of(1)
    plan = plan_for(state, 2)
    with group_of(placements, 2, plan) as group:
        group.senders[1].abort()
        waiting = [
            group.threads.submit(receiver.receive_held, manifest_of(plan), engine.parameters, stall_s=2.0)
            for receiver, engine in zip(group.receivers, engines, strict=True)
        ]
        sending = group.threads.submit(group.senders[0].send, snapshots_of(state, plan)[0], stall_s=2.0)
        for each in (*waiting, sending):
            error = each.exception(STALL_S)
            assert error is None or (isinstance(error, MeshError) and error.reason is Reason.GROUP_BROKEN)
        assert all(each.exception() is not None for each in waiting)


@pytest.mark.parametrize("who", ["a rank that offers nothing", "senders of an older release"])
def test_a_group_with_one_that_knows_no_scatter_is_broadcast_to(who: str) -> None:
    _, placements = engines_of()
    state = state_of(1)
    plan = plan_for(state, 2)
    offered = [placements[0], None] if who.startswith("a rank") else placements
    with group_of(offered, 2, plan if offered is not placements else None) as group:
        assert not any(each.scatters for each in group.senders)
        assert not any(each.is_scattered for each in group.receivers)
        got: list[State] = [{}, {}]
        work: list[Future[Any]] = [
            group.threads.submit(sender.send, each, stall_s=STALL_S)
            for sender, each in zip(group.senders, snapshots_of(state, plan), strict=True)
        ]
        for receiver, found in zip(group.receivers, got, strict=True):
            sink = lambda pairs, found=found: found.update((name, tensor.clone()) for name, tensor in pairs)  # noqa: E731
            work.append(group.threads.submit(receiver.receive, manifest_of(plan), sink, stall_s=STALL_S))
        for each in work:
            each.result(STALL_S)
        assert all(torch.equal(found[name], state[name]) for found in got for name in state)


def test_what_a_sender_has_behind_an_odd_number_of_bytes_of_another_is_taken_too() -> None:
    tensors = {"a": torch.randint(0, 256, (6,), dtype=torch.uint8), "b": torch.randn(4, 2).bfloat16()}
    plan = PublishPlan(
        tensors=plan_tensors([("a", "uint8", (6,)), ("b", "bfloat16", (4, 2))]),
        collective=CollectivePlan(num_senders=2, bucket_bytes=100),
    )
    halves = [{name: tensor.chunk(2)[sender] for name, tensor in tensors.items()} for sender in range(2)]
    bucket = torch.cat([take_snapshot(plan, half, sender, CPU).flat for sender, half in enumerate(halves)])
    held = HeldParts(plan, WeightPlacement.whole(tensors), scattered=False)
    parameters = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    held.open([bucket, bucket], parameters)
    held.take(0, bucket, parameters)
    assert all(map(torch.equal, parameters.values(), tensors.values()))
    assert held.digests(parameters) == WeightPlacement.whole(tensors).digests(tensors)


# --- when it pays ---------------------------------------------------------------------------------


def offered(num_senders: int, num_engines: int, ranks: int) -> bool:
    store, (_, placements) = HashStore(), engines_of(num_engines, ranks)
    for place, placement in enumerate(placements):
        assert placement is not None
        write_offer(store, place, Offer(engine=place - place % ranks, moves=placement.moves))
    return scatter_offers(store, plan_for(state_of(0), num_senders), num_engines * ranks) is not None


@pytest.mark.parametrize(
    ("num_senders", "num_engines", "ranks", "pays"),
    [(2, 1, 2, True), (4, 1, 2, True), (4, 2, 2, True), (1, 1, 2, False), (2, 1, 1, False), (2, 2, 2, False)],
)
def test_versions_are_scattered_where_no_rank_is_busier_than_by_a_broadcast(
    num_senders: int, num_engines: int, ranks: int, pays: bool
) -> None:
    assert offered(num_senders, num_engines, ranks) is pays


WRONG = [
    b"[]", b"{}", b"no json", b'{"engine": 0}', b'{"engine": 0, "moves": [["q", 0, [49], [1]]]}',
    b'{"engine": 0, "moves": [["q", -1, [3], [1]]]}', b'{"engine": 0, "moves": [["q", 0, [3], [0]]]}',
    b'{"engine": 0, "moves": [["q", 0, [3], ["1"]]]}', b'{"engine": 0, "moves": [["q", 0, [3], [1, 1]]]}',
    b'{"engine": 0, "moves": [["nobody", 0, [3], [1]]]}',
]  # fmt: skip


@pytest.mark.parametrize("second", [None, b'{"engine": 0, "moves": [["q", 0, [48], [1]]]}', *WRONG])
def test_without_offers_of_all_that_a_version_has_it_is_broadcast(second: bytes | None) -> None:
    store, plan, (_, placements) = HashStore(), plan_for(state_of(0), 2), engines_of()
    assert placements[0] is not None
    write_offer(store, 0, Offer(engine=0, moves=placements[0].moves))
    if second is not None:
        store.set("offer/1", second)
    if second in WRONG:
        with pytest.raises((ValueError, KeyError, TypeError)):
            read_offers(store, plan, 2)
    assert scatter_offers(store, plan, 2) is None


# --- parts of parts -------------------------------------------------------------------------------


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """Views of a tensor of up to three dimensions, cut anywhere and turned."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cuts = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in sizes]
    cuts = [
        (low, max(high, low + 1)) if low < size else (0, size) for (low, high), size in zip(cuts, sizes, strict=True)
    ]
    order = draw(st.permutations(range(len(sizes))))
    whole = torch.empty(sizes)
    view = whole[tuple(slice(low, high) for low, high in cuts)].permute(*order)
    to = torch.empty(view.shape)
    return Move(
        tensor="t", parameter="p", shape=tuple(view.shape), from_stride=view.stride(),
        from_offset=view.storage_offset(), to_stride=to.stride(), to_offset=0,
    )  # fmt: skip


@given(moves(), st.integers(0, 130), st.integers(0, 130))
def test_what_is_clipped_are_the_elements_within_each_once(move: Move, one: int, other: int) -> None:
    start, end = sorted((one, other))
    tensor, parameter = torch.arange(125.0), torch.full((move.values,), -1.0)
    move.of({"p": parameter}).copy_(tensor.as_strided(move.shape, move.from_stride, move.from_offset))
    expected = torch.where((parameter >= start) & (parameter < end), parameter, -1.0)
    found = torch.full((move.values,), -1.0)
    parts = list(clipped(move, start, end))
    for part in parts:
        part.of({"p": found}).copy_(tensor.as_strided(part.shape, part.from_stride, part.from_offset))
    assert torch.equal(found, expected)
    assert sum(part.values for part in parts) == int((expected >= 0).sum())
