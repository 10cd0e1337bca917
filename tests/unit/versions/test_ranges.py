"""The queue of byte ranges that the connections of a download share: every byte once, whatever breaks."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from meshrl.versions.ranges import SILENT_S, SMALLEST, Claim, RangeQueue
from meshrl.wire.types import ChunkEntry

KIB = 1024


def chunks_of(*lengths: int) -> list[ChunkEntry]:
    return [ChunkEntry(offset=sum(lengths[:i]), length=length, digest=b"") for i, length in enumerate(lengths)]


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_every_byte_is_taken_once_and_every_chunk_completed_once_whatever_breaks(
    data: st.DataObject,
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 200 * KIB), min_size=1, max_size=6))
    chunks = chunks_of(*lengths)
    missing = data.draw(st.sets(st.sampled_from(range(len(chunks))), min_size=1))
    queue = RangeQueue(chunks, missing)
    taken = bytearray(sum(lengths))
    complete: list[int] = []
    held: list[Claim] = []
    now_s = 0.0
    for _ in range(data.draw(st.integers(0, 60))):
        now_s += data.draw(st.sampled_from([0.0, 0.1, SILENT_S + 0.1]))
        does = data.draw(st.sampled_from(["claim", "arrive", "arrive", "break", "again"]))
        if does == "claim":
            claim = queue.claim(
                data.draw(st.integers(1, 300 * KIB)), now_s, data.draw(st.sampled_from([0.0, 1e4, 1e9]))
            )
            if claim is not None:
                assert claim.connections == held.count(claim) + 1
                claim.quiet_from_s = min(claim.quiet_from_s, now_s)
                held.append(claim)
        elif does == "again" and complete:
            index = complete.pop()
            taken[chunks[index].offset : chunks[index].offset + chunks[index].length] = bytes(chunks[index].length)
            queue.refetch(index)
        elif held:
            claim = data.draw(st.sampled_from(held))
            if does == "break":
                held.remove(claim)
                queue.release(claim)
            elif does == "arrive":
                take(queue, claim, data.draw(st.integers(1, 100 * KIB)), now_s, taken, complete)
    for claim in held:  # whatever else happens, the rest comes
        queue.release(claim)
    while queue.chunks_left:
        now_s += 1.0
        left = queue.claim(64 * KIB, now_s)
        assert left is not None
        take(queue, left, 64 * KIB, now_s, taken, complete)
        queue.release(left)
    wanted = bytearray(sum(lengths))
    for index in missing:
        wanted[chunks[index].offset : chunks[index].offset + chunks[index].length] = b"\x01" * chunks[index].length
    assert taken == wanted
    assert sorted(complete) == sorted(missing)
    assert queue.claim(1, now_s + 9.0) is None


def take(queue: RangeQueue, claim: Claim, length: int, now_s: float, taken: bytearray, complete: list[int]) -> None:
    start = claim.at
    kept, done = queue.arrived(claim, length, now_s)
    assert kept <= length
    assert claim.at == start + kept
    assert taken.find(1, start, start + kept) == -1
    taken[start : start + kept] = b"\x01" * kept
    complete += done


def test_ranges_are_claimed_in_order_and_joined_over_neighbouring_chunks() -> None:
    queue = RangeQueue(chunks_of(10, 20, 30, 40), {0, 1, 3})
    claims = [queue.claim(25, 0.0), queue.claim(25, 0.0), queue.claim(25, 0.0), queue.claim(25, 0.0)]
    assert [(claim.at, claim.end) for claim in claims if claim is not None] == [(0, 25), (25, 30), (60, 85), (85, 100)]
    assert queue.unclaimed == 0


def test_large_claims_end_where_a_chunk_does() -> None:
    queue = RangeQueue(chunks_of(20, 20, 20, 20), {0, 1, 2, 3})
    claims = [queue.claim(size, 0.0) for size in (45, 15, 35)]
    assert [(claim.at, claim.end) for claim in claims if claim is not None] == [(0, 40), (40, 55), (55, 80)]


def test_what_would_take_long_is_halved_and_what_stands_still_is_fetched_twice() -> None:
    size = 64 * SMALLEST
    queue = RangeQueue(chunks_of(size), {0})
    slow = queue.claim(size, 0.0, rate=16 * SMALLEST)
    assert slow is not None
    slow.quiet_from_s = 0.0
    half = queue.claim(size, 0.1)
    assert half is not None
    assert (slow.end, half.at, half.end) == (size // 2, size // 2, size)
    queue.arrived(half, size // 2 - 1, SILENT_S)
    assert queue.claim(size, SILENT_S + 0.1) is slow  # which has had nothing since
    queue.release(slow)
    assert queue.unclaimed == 0  # the other connection is still at it
    queue.release(slow)
    assert queue.unclaimed == size // 2


def test_a_claim_that_waits_for_the_rate_limit_does_not_stand_still() -> None:
    queue = RangeQueue(chunks_of(SMALLEST), {0})
    assert queue.claim(SMALLEST, 0.0) is not None
    assert queue.claim(SMALLEST, 10 * SILENT_S) is None


def test_who_is_fast_enough_is_left_alone() -> None:
    queue = RangeQueue(chunks_of(64 * SMALLEST), {0})
    assert queue.claim(64 * SMALLEST, 0.0, rate=1e9) is not None
    assert queue.claim(64 * SMALLEST, 0.1) is None
