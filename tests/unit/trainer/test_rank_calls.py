"""Rank 0's calls to the publishing threads of other ranks, over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import HeldSnapshot, whole_snapshot
from meshrl.versions.transports import rank_calls
from meshrl.versions.transports.base import Answer, PublishCall
from meshrl.versions.transports.rank_calls import RankCalls, RankCallThread
from meshrl.wire.errors import MeshError, Reason


def answer(rank: int) -> Answer:
    return {"ranks": {str(rank): "done"}}


@dataclass(frozen=True, kw_only=True)
class Work(PublishCall):
    version: int


class Share:
    def __init__(self, rank: int, failure: MeshError | None = None) -> None:
        self.rank, self.failure = rank, failure
        self.progress = Progress()
        self.slow_s = 0.0  # of the next call, which moves all the time
        self.done: list[int] = []

    @property
    def handlers(self) -> Mapping[type[PublishCall], Callable[[Any], Answer]]:
        return {Work: self.carry_out}

    def carry_out(self, call: Work) -> Answer:
        if self.failure is not None:
            raise self.failure
        ends_s = time.monotonic() + self.slow_s
        while time.monotonic() < ends_s:
            time.sleep(0.02)
            self.progress.moved()
        self.done.append(call.version)
        return answer(self.rank)


def test_every_rank_carries_out_every_call_in_order() -> None:
    store = open_store("127.0.0.1", deadline_s=5.0)
    shares = [Share(rank) for rank in range(3)]
    calls = RankCalls(shares[0], store, num_ranks=3)
    for rank in (1, 2):
        RankCallThread(shares[rank], reach_store(f"127.0.0.1:{store.port}", deadline_s=5.0), rank=rank)
    for number in range(5):
        answers = calls.call(Work(version=number), stall_s=5.0)
        assert answers == [answer(0), answer(1), answer(2)]
    assert [share.done for share in shares] == [[0, 1, 2, 3, 4]] * 3


def test_failure_of_a_rank_is_rank_0s_to_hear_and_the_next_call_works() -> None:
    store = open_store("127.0.0.1", deadline_s=5.0)
    other = Share(1, MeshError(Reason.GROUP_BROKEN, "gone"))
    calls = RankCalls(Share(0), store, num_ranks=2)
    RankCallThread(other, reach_store(f"127.0.0.1:{store.port}", deadline_s=5.0), rank=1)
    with pytest.raises(MeshError, match="rank 1: gone") as caught:
        calls.call(Work(version=0), stall_s=5.0)
    assert caught.value.reason is Reason.GROUP_BROKEN
    other.failure = None
    assert calls.call(Work(version=1), stall_s=5.0) == [answer(0), answer(1)]


def test_a_rank_that_moves_may_take_as_long_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_calls, "TELL_S", 0.05)
    store = open_store("127.0.0.1", deadline_s=5.0)
    own, other = Share(0), Share(1)
    calls = RankCalls(own, store, num_ranks=2)
    RankCallThread(other, reach_store(f"127.0.0.1:{store.port}", deadline_s=5.0), rank=1)
    began_s, other.slow_s = own.progress.moved_s, 3.2
    assert calls.call(Work(version=0), stall_s=3.0) == [answer(0), answer(1)]
    assert own.progress.moved_s > began_s


def test_rank_that_does_not_answer_costs_the_deadline_and_no_more() -> None:
    calls = RankCalls(Share(0), open_store("127.0.0.1", deadline_s=60.0), num_ranks=2)
    with pytest.raises(MeshError) as caught:
        calls.call(Work(version=0), stall_s=0.3)
    assert caught.value.reason is Reason.DEADLINE_PASSED


def test_snapshot_is_waited_for_and_a_newer_one_replaces_it() -> None:
    held = HeldSnapshot()
    one, two = (whole_snapshot({"w": torch.zeros(1)}) for _ in range(2))
    threading.Timer(0.1, held.put, (1, one)).start()
    assert held.get(1, deadline_s=5.0) is one
    held.put(2, two)
    with pytest.raises(MeshError, match="already has version 2"):
        held.get(1, deadline_s=5.0)
    assert held.drop() is two
    with pytest.raises(MeshError, match=r"no version 2 after 0\.1 s"):
        held.get(2, deadline_s=0.1)
