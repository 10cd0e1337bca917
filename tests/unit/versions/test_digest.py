"""The additive digest: it does not depend on how rows are shared, and it changes with every bit and place."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from meshrl.versions.collective.digest import GOLDEN, MIX_1, MIX_2, SPREAD, digest_bytes, sum128


def plain(data: bytes) -> bytes:
    """The definition, word by word in Python's integers."""
    lanes = [0, 0]
    data += b"\0" * (len(data) % 2)
    for i in range(len(data) // 2):
        z = (int.from_bytes(data[2 * i : 2 * i + 2], "little") + (i + 1) * GOLDEN) % 2**64
        z = (z ^ (z >> 30)) * MIX_1 % 2**64
        z = (z ^ (z >> 27)) * MIX_2 % 2**64
        z ^= z >> 31
        lanes[0] = (lanes[0] + z) % 2**64
        lanes[1] = (lanes[1] + (z ^ (z >> 29)) * SPREAD) % 2**64
    return b"".join(lane.to_bytes(8, "little") for lane in lanes)


@given(st.binary(max_size=64))
def test_digest_is_the_definitions(data: bytes) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    assert digest_bytes(sum128(tensor)) == plain(data)


@settings(deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 5), cuts=st.lists(st.integers(0, 9), max_size=3))
def test_shards_add_up_to_the_whole(rows: int, columns: int, cuts: list[int]) -> None:
    whole = torch.randn(rows, columns).bfloat16()
    bounds = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    total = torch.zeros(2, dtype=torch.int64)
    for start, end in pairwise(bounds):
        total += sum128(whole[start:end].contiguous(), first_word=start * columns)
    assert digest_bytes(total) == digest_bytes(sum128(whole))


def test_one_bit_and_one_swap_change_it() -> None:
    whole = torch.randn(600_000).bfloat16()
    before = digest_bytes(sum128(whole))
    flipped = whole.clone()
    flipped.view(torch.int16)[432_100] ^= 1
    swapped = whole.clone()
    swapped[3], swapped[500_000] = whole[500_000], whole[3]
    assert whole[3] != whole[500_000]
    assert len({before, digest_bytes(sum128(flipped)), digest_bytes(sum128(swapped))}) == 3
