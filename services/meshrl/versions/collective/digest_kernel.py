"""The additive digest on a GPU: one pass over the words of many tensors at the speed of the memory."""

# mypy: ignore-errors
# (Triton compiles these functions itself; they have no Python types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _terms(word, place):
    """The terms of both lanes of words (W,) int16 whose places, plus one, are `place`."""
    z = word.to(tl.uint16, bitcast=True).to(tl.uint64)
    z += place.to(tl.uint64) * tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((1,), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((1,), 0x94D049BB133111EB, tl.uint64)
    z = z ^ (z >> 31)
    spread = (z ^ (z >> 29)) * tl.full((1,), 0xD6E8FEB86659FD93, tl.uint64)
    return z.to(tl.int64, bitcast=True), spread.to(tl.int64, bitcast=True)


@triton.jit
def _offsets(first, width, step, to_step, place_step, WORDS: tl.constexpr, IN_ROWS: tl.constexpr):
    """Of the words (WORDS,) from `first` on: which they are, and their distances from the first one of all, in memory,
    where they are copied to, and in places."""
    index = first + tl.arange(0, WORDS)
    if not IN_ROWS:
        return index, index, index, index
    row = first // width
    column = (first - row * width).to(tl.int32) + tl.arange(0, WORDS)
    rows_on = column // width.to(tl.int32)
    row += rows_on.to(tl.int64)
    column -= rows_on * width.to(tl.int32)
    return index, row * step + column, row * to_step + column, row * place_step + column


@triton.jit(do_not_specialize=["first_tensor"])
def digest_words(
    table_ptr,
    partial_ptr,
    first_tensor,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    IN_ROWS: tl.constexpr,
    COPY: tl.constexpr,
):
    """Program (t, p) of a grid (., P) sums the two lanes of blocks p, p + P, ... of WORDS words each.

    They are blocks of tensor `first_tensor` + t, and copied on the way where COPY is set.

    `table` (T, 8) int64: words from `partial` to the first one in memory, how many they are, and the place of the first
    one. IN_ROWS: words of a row (less than 2^30), and from one row to the next in memory and in places. COPY: words
    from `partial` to where the first one goes, and IN_ROWS from one row to the next there.
    `partial` (T, P, 2) int64. ALIGNED: all of the first are multiples of 8, so that eight words are loaded at once.
    """
    tensor, program = first_tensor + tl.program_id(0), tl.program_id(1)
    row_ptr = table_ptr + 8 * tensor
    away, num_words, first_place = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2) + 1
    width, step, place_step = tl.load(row_ptr + 3), tl.load(row_ptr + 4), tl.load(row_ptr + 5)
    to_away, to_step = tl.load(row_ptr + 6), tl.load(row_ptr + 7)
    if ALIGNED:
        away, to_away = tl.multiple_of(away, 8), tl.multiple_of(to_away, 8)
    words_ptr = partial_ptr.to(tl.pointer_type(tl.int16)) + away
    to_ptr = partial_ptr.to(tl.pointer_type(tl.int16)) + to_away
    lane_0 = tl.full((), 0, tl.int64)
    lane_1 = tl.full((), 0, tl.int64)
    whole = num_words // WORDS
    for block in range(program, whole, tl.num_programs(1)):
        first = tl.cast(block, tl.int64) * WORDS
        _, at, to, place = _offsets(first, width, step, to_step, place_step, WORDS, IN_ROWS)
        words = tl.load(words_ptr + at)
        if COPY:
            tl.store(to_ptr + to, words)
        term_0, term_1 = _terms(words, place + first_place)
        lane_0 += tl.sum(term_0, axis=0)
        lane_1 += tl.sum(term_1, axis=0)
    if program == whole % tl.num_programs(1):
        index, at, to, place = _offsets(whole * WORDS, width, step, to_step, place_step, WORDS, IN_ROWS)
        inside = index < num_words
        words = tl.load(words_ptr + at, mask=inside, other=0)
        if COPY:
            tl.store(to_ptr + to, words, mask=inside)
        term_0, term_1 = _terms(words, place + first_place)
        nothing = tl.zeros((WORDS,), tl.int64)
        lane_0 += tl.sum(tl.where(inside, term_0, nothing), axis=0)
        lane_1 += tl.sum(tl.where(inside, term_1, nothing), axis=0)
    at = partial_ptr + 2 * (tensor.to(tl.int64) * tl.num_programs(1) + program)
    tl.store(at, lane_0)
    tl.store(at + 1, lane_1)
