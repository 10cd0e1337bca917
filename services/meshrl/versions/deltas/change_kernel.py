"""Changes of a delta on a GPU, made in many parameters at once."""

# mypy: ignore-errors
# (Triton compiles these functions itself; they have no Python types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def change_words(table_ptr, at_ptr, steps_ptr, BITS: tl.constexpr, CHANGES: tl.constexpr):
    """Program (s, p) of a grid (S, P) makes blocks p, p + P, ... of CHANGES changes each of span s.

    `table` (S, 6) int64: first change, end, address of the parameter, and a, b, c: what is at element x of the stream
    is at (x - a) * b + c of the parameter. `at`, `steps` (C,) int64 as of `on_device.moved_bits`.
    """
    row = table_ptr + 6 * tl.program_id(0)
    begin, end = tl.load(row), tl.load(row + 1)
    of_BITS: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    words_ptr = tl.load(row + 2).to(tl.pointer_type(of_BITS))
    origin, stride, to = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    HALF: tl.constexpr = 1 << (BITS - 1)
    for block in range(tl.program_id(1), tl.cdiv(end - begin, CHANGES), tl.num_programs(1)):
        change = begin + tl.cast(block, tl.int64) * CHANGES + tl.arange(0, CHANGES)
        inside = change < end
        where = (tl.load(at_ptr + change, mask=inside, other=0) - origin) * stride + to
        word = tl.load(words_ptr + where, mask=inside, other=0).to(tl.int64)
        place = tl.where(word < 0, -1 - word - HALF, word) + tl.load(steps_ptr + change, mask=inside, other=0)
        place = ((place + HALF) & (2 * HALF - 1)) - HALF
        word = tl.where(place < 0, -1 - place - HALF, place)
        tl.store(words_ptr + where, word.to(of_BITS), mask=inside)
