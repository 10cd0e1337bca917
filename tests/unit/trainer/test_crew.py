"""Rank 0's words to the publishing threads of other ranks, over a real store."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from meshrl.trainer.publishing import rank_calls as crew_module
from meshrl.trainer.publishing.progress import Progress
from meshrl.trainer.publishing.rank_calls import Crew, CrewMember, Held, Word
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.wire.errors import MeshError, Reason


class Share:
    def __init__(self, rank: int, failure: MeshError | None = None) -> None:
        self.rank, self.failure = rank, failure
        self.progress = Progress()
        self.slow_s = 0.0  # of the time between two moves of the next word
        self.done: list[int] = []

    def work(self, word: Word) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        for _ in range(8 if self.slow_s else 0):
            time.sleep(self.slow_s)
            self.progress.moved()
        self.done.append(word["number"])
        return {"rank": self.rank}


def test_every_rank_does_every_word_in_order() -> None:
    store = open_store("127.0.0.1", deadline_s=5.0)
    shares = [Share(rank) for rank in range(3)]
    crew = Crew(shares[0], store, size=3)
    members = [
        CrewMember(shares[rank], reach_store(f"127.0.0.1:{store.port}", deadline_s=5.0), rank=rank) for rank in (1, 2)
    ]
    for number in range(5):
        answers = crew.work({"do": "count", "number": number}, stall_s=5.0)
        assert answers == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert [share.done for share in shares] == [[0, 1, 2, 3, 4]] * 3
    crew.end()
    for member in members:
        member.join(5.0)


def test_failure_of_a_rank_is_rank_0s_to_hear_and_the_next_word_works() -> None:
    store = open_store("127.0.0.1", deadline_s=5.0)
    other = Share(1, MeshError(Reason.GROUP_BROKEN, "gone"))
    crew = Crew(Share(0), store, size=2)
    member = CrewMember(other, reach_store(f"127.0.0.1:{store.port}", deadline_s=5.0), rank=1)
    with pytest.raises(MeshError, match="rank 1: gone") as caught:
        crew.work({"do": "count", "number": 0}, stall_s=5.0)
    assert caught.value.reason is Reason.GROUP_BROKEN
    other.failure = None
    assert crew.work({"do": "count", "number": 1}, stall_s=5.0) == [{"rank": 0}, {"rank": 1}]
    crew.end()
    member.join(5.0)


def test_a_rank_that_moves_may_take_as_long_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "TELL_S", 0.05)
    store = open_store("127.0.0.1", deadline_s=5.0)
    own, other = Share(0), Share(1)
    crew = Crew(own, store, size=2)
    member = CrewMember(other, reach_store(f"127.0.0.1:{store.port}", deadline_s=5.0), rank=1)
    began_s, other.slow_s = own.progress.moved_s, 0.4
    assert crew.work({"do": "count", "number": 0}, stall_s=2.0) == [{"rank": 0}, {"rank": 1}]
    assert own.progress.moved_s > began_s + 2.0
    crew.end()
    member.join(5.0)


def test_rank_that_does_not_answer_costs_the_deadline_and_no_more() -> None:
    crew = Crew(Share(0), open_store("127.0.0.1", deadline_s=60.0), size=2)
    began_s = time.monotonic()
    with pytest.raises(MeshError) as caught:
        crew.work({"do": "count", "number": 0}, stall_s=0.3)
    assert caught.value.reason is Reason.DEADLINE_PASSED
    assert time.monotonic() - began_s < 30.0


def test_snapshot_is_waited_for_and_a_newer_one_replaces_it() -> None:
    held = Held()
    threading.Timer(0.1, held.put, (1, "one")).start()
    assert held.get(1, deadline_s=5.0) == "one"
    held.put(2, "two")
    with pytest.raises(MeshError, match="already has version 2"):
        held.get(1, deadline_s=5.0)
    assert held.drop() == "two"
    with pytest.raises(MeshError, match=r"no version 2 after 0\.1 s"):
        held.get(2, deadline_s=0.1)
