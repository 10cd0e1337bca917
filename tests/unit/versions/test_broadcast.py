"""Senders and receivers over gloo: what arrives, and what happens when somebody does not."""

from __future__ import annotations

import gc
import itertools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from meshrl.core.clock import AwakeClock
from meshrl.versions.collective import communicator
from meshrl.versions.collective.broadcasting import Receiver, Sender
from meshrl.versions.collective.communicator import Communicator, open_store, reach_store
from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.plan import PublishPlan, rows_of
from meshrl.versions.deltas.codec import Rows, encode, read_stream, unpack, write_stream
from meshrl.versions.snapshot import take_snapshot
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import ChunkEntry, CollectivePlan, JoinGroup, Manifest, TensorEntry, Transport

CPU = torch.device("cpu")
STALL_S = 60.0


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(37, 24).bfloat16(),
        "layer.0.norm": torch.randn(5).bfloat16(),
        "layer.0.proj": torch.randn(3, 16).bfloat16(),
        "layer.0.experts": torch.randn(6, 4, 3),
        "layer.1.empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "layer.1.scale": torch.randn(1),
        "layer.1.steps": torch.arange(7),
    }


def entries(state: dict[str, torch.Tensor]) -> list[TensorEntry]:
    plans = manifests.plan_tensors(
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items()
    )
    return [
        TensorEntry(
            name=p.name, dtype=p.dtype, shape=p.shape, offset=p.offset, num_bytes=p.num_bytes,
            digest=digest_bytes(sum128(state[p.name])),
        )
        for p in plans
    ]  # fmt: skip


def manifest_of(tensors: list[TensorEntry], plan: CollectivePlan) -> Manifest:
    return manifests.build_manifest(
        run_id="main", epoch=1, version=3, transport=Transport.NCCL, tensors=tuple(tensors), chunks=(),
        collective=plan,
    )  # fmt: skip


def shared(tensors: list[TensorEntry], plan: CollectivePlan) -> PublishPlan:
    return PublishPlan(tensors=tuple(tensors), collective=plan)


def shards_of(
    state: dict[str, torch.Tensor], tensors: list[TensorEntry], plan: CollectivePlan, sender: int
) -> dict[str, torch.Tensor]:
    """What a rank of a sharded trainer holds: its rows of each tensor, of some all or nothing."""
    found = {}
    for index, entry in enumerate(tensors):
        rows = entry.shape[0]
        part = plan.row_order[sender] if index in plan.reordered_tensors else sender
        whole = (0, rows if sender == 0 else 0)
        start, end = whole if index in plan.whole_tensors else rows_of(rows, part, plan.num_senders)
        found[entry.name] = state[entry.name][start:end].clone()
    return found


class Group:
    """Senders and receivers of one group, each on a thread."""

    def __init__(self, num_senders: int, num_receivers: int, *, generation: int = 1, deadline_s: float = 30.0) -> None:
        self.store: TCPStore = open_store("127.0.0.1", deadline_s=30.0)
        self.threads = ThreadPoolExecutor(8)
        self.group = group = JoinGroup(
            generation=generation, store_address=f"127.0.0.1:{self.store.port}", backend="gloo",
            num_senders=num_senders, num_receivers=num_receivers, first_receiver=0, deadline_s=deadline_s,
        )  # fmt: skip
        self.senders: list[Future[Sender]] = [
            self.threads.submit(
                Sender.meet, reach_store(group.store_address, deadline_s=30.0), generation=generation, backend="gloo",
                sender=sender, num_receivers=num_receivers, device=CPU, deadline_s=deadline_s,
            )
            for sender in range(num_senders)
        ]  # fmt: skip

    def receiver(self, index: int) -> Future[Receiver]:
        return self.threads.submit(Receiver.join, self.group, index=index, device=CPU)


def collect(into: dict[str, torch.Tensor]) -> Callable[..., None]:
    def sink(tensors: list[tuple[str, torch.Tensor]]) -> None:
        into.update({name: tensor.clone() for name, tensor in tensors})

    return sink


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 1), (1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**6])
def test_receivers_get_the_senders_tensors_to_the_bit(num_senders: int, num_receivers: int, bucket_bytes: int) -> None:
    state = weights()
    tensors = entries(state)
    whole = tuple(i for i, entry in enumerate(tensors) if entry.name in ("layer.1.scale", "layer.1.steps"))
    plan = CollectivePlan(
        num_senders=num_senders, bucket_bytes=bucket_bytes, whole_tensors=whole,
        reordered_tensors=tuple(i for i, entry in enumerate(tensors) if entry.name == "layer.0.experts"),
        row_order=tuple(reversed(range(num_senders))),
    )  # fmt: skip
    manifest = manifest_of(tensors, plan)
    group = Group(num_senders, num_receivers)
    receivers = [future.result(60.0) for future in [group.receiver(index) for index in range(num_receivers)]]
    senders = [future.result(60.0) for future in group.senders]
    for _ in range(2):  # buffers are used again
        shards = [shards_of(state, tensors, plan, sender) for sender in range(num_senders)]
        snapshots = [take_snapshot(shared(tensors, plan), shards[sender], sender, CPU) for sender in range(num_senders)]
        submit = group.threads.submit
        got: list[dict[str, torch.Tensor]] = [{} for _ in receivers]
        work: list[Future[Any]] = [
            submit(sender.send, each, stall_s=STALL_S) for sender, each in zip(senders, snapshots, strict=True)
        ]
        for receiver, found in zip(receivers, got, strict=True):
            work.append(submit(receiver.receive, manifest, collect(found), stall_s=STALL_S))
        for future in work:
            future.result(60.0)
        for found in got:
            assert found.keys() == state.keys()
            assert all(torch.equal(found[name], state[name]) for name in state)


def test_snapshot_casts_to_the_published_type_and_outlives_the_next_step() -> None:
    live = {"w": torch.randn(8, 4)}
    tensors = entries({"w": live["w"].bfloat16()})
    plan = CollectivePlan(num_senders=1, bucket_bytes=10**6)
    snapshot = take_snapshot(shared(tensors, plan), live, 0, CPU)
    before = live["w"].bfloat16()
    live["w"].add_(1.0)
    assert torch.equal(snapshot.flat.view(torch.bfloat16).reshape(8, 4), before)
    again = take_snapshot(shared(tensors, plan), live, 0, CPU, reuse=snapshot.flat)
    assert again.flat.data_ptr() == snapshot.flat.data_ptr()
    with pytest.raises(ValueError, match=r"sender 0 has \(7, 4\) of w, expected 8 rows"):
        take_snapshot(shared(tensors, plan), {"w": live["w"][:7]}, 0, CPU)


def test_damaged_tensor_is_named() -> None:
    state = weights()
    tensors = entries(state)
    plan = CollectivePlan(num_senders=1, bucket_bytes=10**6)
    manifest = manifest_of(tensors, plan)
    group = Group(1, 1)
    receiver = group.receiver(0).result(60.0)
    state["layer.0.proj"].view(torch.int16)[1, 2] ^= 1
    snapshot = take_snapshot(shared(tensors, plan), state, 0, CPU)
    sending = group.threads.submit(group.senders[0].result().send, snapshot, stall_s=STALL_S)
    with pytest.raises(MeshError, match=r"layer\.0\.proj") as caught:
        receiver.receive(manifest, lambda _: None, stall_s=STALL_S)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    sending.result(60.0)


def test_receiver_that_never_comes_breaks_the_meeting_in_time_and_is_named() -> None:
    group = Group(1, 2, deadline_s=0.6)
    group.receiver(0)
    with pytest.raises(MeshError, match=r"rank 2 of 3 did not come within 0\.6 s") as caught:
        group.senders[0].result(60.0)
    assert caught.value.reason is Reason.GROUP_BROKEN


def test_a_place_in_a_group_is_taken_once() -> None:
    """An engine that is killed in a group and comes back under its id: neither of its parts waits for the dead ones."""
    group = Group(1, 2)
    for first in [group.receiver(index) for index in range(2)]:
        first.result(60.0)
    for again in [group.receiver(index) for index in range(2)]:
        with pytest.raises(MeshError, match=r"rank [12] was taken before, by another process") as caught:
            again.result(60.0)
        assert caught.value.reason is Reason.GROUP_BROKEN


def test_delta_that_is_damaged_on_its_way_is_refused_and_the_group_takes_the_next() -> None:
    plan = manifests.plan_tensors([("a", "bfloat16", (64, 8)), ("b", "bfloat16", (6,))])
    collective = CollectivePlan(num_senders=2, bucket_bytes=100)
    of_plan, threads = PublishPlan(tensors=plan, collective=collective), ThreadPoolExecutor(2)
    old = torch.randn(518).bfloat16()
    new = old.clone()
    new[::3] *= 1.01
    state = {"a": new[:512].view(64, 8), "b": new[512:]}
    parts, places = [], np.flatnonzero(old.view(torch.int16).numpy() != new.view(torch.int16).numpy())
    for sender in range(2):
        pieces = list(of_plan.pieces(sender))
        spans = [(plan[piece.tensor].offset + piece.start, piece.end - piece.start) for piece in pieces]
        before, after = (
            np.concatenate([each.view(torch.uint8).numpy()[at : at + length] for at, length in spans])
            for each in (old, new)
        )
        parts.append(write_stream([packed for _, packed in encode(Rows(plan, spans), before, after, threads)]))
    chunks = tuple(
        ChunkEntry(offset=sender * len(parts[0]), length=len(part), digest=manifests.digest(part.data))
        for sender, part in enumerate(parts)
    )
    base = manifest_of(entries(state), collective)
    manifest = manifests.delta_manifest(base, base, chunks)
    group = Group(2, 1)
    receiver, senders = group.receiver(0).result(60.0), [future.result(60.0) for future in group.senders]
    damaged = parts[1].copy()
    damaged[-1] ^= 1
    for second in (damaged, parts[1]):
        work = [
            group.threads.submit(sender.send_delta, delta, of_plan, stall_s=STALL_S)
            for sender, delta in zip(senders, (parts[0], second), strict=True)
        ]
        received = group.threads.submit(receiver.receive_delta, manifest, stall_s=STALL_S)
        for each in work:
            each.result(60.0)
        if second is damaged:
            with pytest.raises(MeshError, match="of sender 1 is not what its manifest lists"):
                received.result(60.0)
    assert unpack(*read_stream(received.result(60.0))).places.tolist() == places.tolist()


def test_sender_that_stops_in_the_middle_ends_the_receive_within_the_stall() -> None:
    tensors = entries(weights())
    manifest = manifest_of(tensors, CollectivePlan(num_senders=1, bucket_bytes=300))
    group = Group(1, 1)
    receiver = group.receiver(0).result(60.0)
    group.senders[0].result()
    began_s = time.monotonic()
    with pytest.raises(MeshError) as caught:
        receiver.receive(manifest, lambda _: None, stall_s=0.5)
    assert caught.value.reason is Reason.GROUP_BROKEN
    assert time.monotonic() - began_s < 60.0


def test_time_in_which_the_receiver_itself_stood_still_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    monkeypatch.setattr(communicator, "AwakeClock", lambda: AwakeClock(lambda: time.monotonic() + 40 * next(looks)))
    state = weights()
    tensors = entries(state)
    plan = CollectivePlan(num_senders=1, bucket_bytes=300)
    group = Group(1, 1)
    receiver, sender = group.receiver(0).result(60.0), group.senders[0].result(60.0)
    received = group.threads.submit(receiver.receive, manifest_of(tensors, plan), lambda _: None, stall_s=STALL_S)
    time.sleep(0.2)  # some hundred looks, each of which finds that 40 s have passed
    sender.send(take_snapshot(shared(tensors, plan), state, 0, CPU), stall_s=STALL_S)
    assert received.result(60.0).wire_s > 0


def test_abort_from_another_thread_ends_a_receive_at_once() -> None:
    tensors = entries(weights())
    manifest = manifest_of(tensors, CollectivePlan(num_senders=1, bucket_bytes=300))
    group = Group(1, 1)
    receiver = group.receiver(0).result(60.0)
    group.senders[0].result()
    threading.Timer(0.2, receiver.abort).start()
    with pytest.raises(MeshError, match="was ended") as caught:
        receiver.receive(manifest, lambda _: None, stall_s=30.0)
    assert caught.value.reason is Reason.GROUP_BROKEN


def test_sink_that_raises_ends_the_group_so_that_nobody_waits_for_it() -> None:
    state = weights()
    tensors = entries(state)
    plan = CollectivePlan(num_senders=1, bucket_bytes=300)
    group = Group(1, 1)
    receiver = group.receiver(0).result(60.0)
    group.senders[0].result(60.0)

    def sink(_: object) -> None:
        raise MeshError(Reason.LAYOUT_MISMATCH, "no such tensor here")

    sending = group.threads.submit(
        group.senders[0].result().send,
        take_snapshot(shared(tensors, plan), state, 0, CPU),
        stall_s=STALL_S,
    )
    with pytest.raises(MeshError, match="no such tensor"):
        receiver.receive(manifest_of(tensors, plan), sink, stall_s=STALL_S)
    with pytest.raises(MeshError, match="was ended"):  # rather than take what is left of the version before
        receiver.receive(manifest_of(tensors, plan), lambda _: None, stall_s=STALL_S)
    group.senders[0].result().abort()
    sending.exception(60.0)


def test_group_without_a_store_is_broken() -> None:
    group = JoinGroup(
        generation=1, store_address="127.0.0.1:9", backend="gloo", num_senders=1, num_receivers=1, first_receiver=0,
        deadline_s=0.5,
    )  # fmt: skip
    with pytest.raises(MeshError, match=r"127\.0\.0\.1:9") as caught:
        Receiver.join(group, index=0, device=CPU)
    assert caught.value.reason is Reason.GROUP_BROKEN


def test_group_that_is_dropped_with_a_broadcast_under_way_does_not_stop_the_program() -> None:
    store = open_store("127.0.0.1", deadline_s=10.0)
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(
                Communicator, reach_store(f"127.0.0.1:{store.port}", deadline_s=5.0), generation=1, sender=0, rank=rank,
                size=2, backend="gloo", device=CPU, deadline_s=5.0,
            )
            for rank in range(2)
        ]  # fmt: skip
        sender, receiver = (side.result() for side in sides)
    receiver.broadcast(torch.empty(100, dtype=torch.uint8))  # which never comes
    began_s = time.monotonic()
    del sides, receiver
    gc.collect()
    assert time.monotonic() - began_s < 60.0
    sender.abort()


def test_store_listens_at_its_host_and_nowhere_else() -> None:
    store = open_store("127.0.0.1", deadline_s=10.0)
    reach_store(f"127.0.0.1:{store.port}", deadline_s=10.0).set("word", "heard")
    assert store.get("word") == b"heard"
    with pytest.raises(ConnectionRefusedError):  # another address of this host
        socket.create_connection(("127.0.0.2", store.port), 10.0).close()


def test_store_that_cannot_listen_where_it_should_says_so() -> None:
    with pytest.raises(MeshError, match=r"cannot listen at 192\.0\.2\.1: .*; name an address of this host") as caught:
        open_store("192.0.2.1", deadline_s=10.0)
    assert caught.value.reason is Reason.GROUP_BROKEN
