"""The additive digest on a GPU: one pass over the words at the speed of the memory."""

# mypy: ignore-errors
# (Triton compiles these functions itself; they have no Python types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def digest_words(words_ptr, partial_ptr, num_words, first_word, num_blocks, WORDS: tl.constexpr):
    """Each program sums the two lanes of WORDS words into column `program` of partial (2, num_blocks)."""
    block = tl.program_id(0).to(tl.int64)
    place = block * WORDS + tl.arange(0, WORDS).to(tl.int64)
    inside = place < num_words
    word = tl.load(words_ptr + place, mask=inside, other=0).to(tl.uint16, bitcast=True).to(tl.uint64)
    golden = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    z = word + (place + first_word + 1).to(tl.uint64) * golden
    z = (z ^ (z >> 30)) * tl.full((1,), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((1,), 0x94D049BB133111EB, tl.uint64)
    z = z ^ (z >> 31)
    spread = (z ^ (z >> 29)) * tl.full((1,), 0xD6E8FEB86659FD93, tl.uint64)
    nothing = tl.zeros((WORDS,), tl.uint64)
    lane_0 = tl.sum(tl.where(inside, z, nothing).to(tl.int64, bitcast=True), axis=0)
    lane_1 = tl.sum(tl.where(inside, spread, nothing).to(tl.int64, bitcast=True), axis=0)
    tl.store(partial_ptr + block, lane_0)
    tl.store(partial_ptr + num_blocks + block, lane_1)
