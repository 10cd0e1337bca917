"""The additive digest of weights (`sum128`): digests of shards add up to that of their tensor, on a CPU or a GPU.

A hash such as BLAKE3 needs the bytes in order and on the host. This digest of broadcast versions and deltas is a sum
over 16-bit words, each mixed with its place in the tensor, so every rank digests its own rows where they are. It finds
damage and mix-ups, not forgery.

Definition, in arithmetic modulo 2^64, for word w_i (little-endian) at place i of the whole tensor's bytes:
    z_i = mix64(w_i + (i + 1) * GOLDEN)        mix64 is the finaliser of SplitMix64 (Steele et al., 2014)
    lane 0 = sum of z_i                        lane 1 = sum of (z_i ^ (z_i >> 29)) * SPREAD
A tensor with an odd number of bytes counts one zero byte more at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SPREAD = 0xD6E8FEB86659FD93
BLOCK_WORDS = 2**14
KERNEL_WORDS = 4096
KERNEL_PROGRAMS = 1024  # for one tensor at most


def sum128(tensor: torch.Tensor, first_word: int = 0) -> torch.Tensor:
    """(2,) int64 lanes, on its device, of a contiguous tensor whose first word has place `first_word`."""
    if tensor.numel() == 0:  # which may have no strides that a view wants
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    if tensor.device.type == "cuda":
        return sum128_each([tensor], [first_word])[0]
    return torch.from_numpy(_on_cpu(_words(tensor).numpy().view(np.uint16), first_word).view(np.int64))


def sum128_each(tensors: Sequence[torch.Tensor], first_words: Sequence[int]) -> torch.Tensor:
    """(T, 2) int64 lanes as of `sum128`, of tensors on one device; a GPU takes one pass for all."""
    if not tensors or tensors[0].device.type != "cuda":
        lanes = [sum128(tensor, first) for tensor, first in zip(tensors, first_words, strict=True)]
        return torch.stack(lanes) if lanes else torch.zeros((0, 2), dtype=torch.int64)
    whole = [_words(each.clone()) if (each.nbytes | each.data_ptr()) % 2 else each for each in tensors]
    runs = [(each.data_ptr(), each.nbytes // 2, first) for each, first in zip(whole, first_words, strict=True)]
    sums = WordSums([Words(*run) for run in runs], tensors[0].device)
    sums.add(0, len(runs))
    return sums.lanes()


class Words(NamedTuple):
    """16-bit words in a GPU's memory: a run, or rows of `width` each."""

    address: int
    num_words: int
    first_place: int
    width: int = 0
    step: int = 0
    """Words from one row to the next in memory."""

    place_step: int = 0
    """The same between their places."""

    target: int = 0
    """Address to which they are copied on the way; 0: they are only digested."""

    target_step: int = 0
    """As `step`, there."""


class WordSums:
    """The lanes of parts in a GPU's memory. They are all runs, or all in rows of less than 2^30 words; and all are
    copied, or none.

    A call to torch for each part would each time wait for the interpreter's lock beside an engine that samples.
    """

    def __init__(self, parts: Sequence[Words], device: torch.device) -> None:
        self._device, first = device, parts[0]
        self._programs = min(KERNEL_PROGRAMS, max(1, -(-max(part.num_words for part in parts) // KERNEL_WORDS)))
        self._partial = torch.empty((len(parts), self._programs, 2), dtype=torch.int64, device=device)
        base, copied = self._partial.data_ptr(), first.target > 0

        def away(address: int) -> int:
            return (address - base) // 2

        table = [(away(each.address), *each[1:6], away(each.target), each.target_step) for each in parts]
        aligned = first.width == 0 and all(row[0] % 8 == 0 and not (copied and row[6] % 8) for row in table)
        self._kind = {"ALIGNED": aligned, "IN_ROWS": first.width > 0, "COPY": copied}
        self._table = on_gpu(table, device)

    def add(self, first: int, last: int) -> None:
        """Sums parts [first, last), as they are now on the current stream, and copies them if they have a target."""
        # compiled once a process; Triton is there only where torch has a GPU
        from meshrl.versions.collective.digest_kernel import digest_words

        with torch.cuda.device(self._device):  # Triton launches on the thread's device, whatever the tensor's is
            digest_words[(last - first, self._programs)](
                self._table, self._partial, first, WORDS=KERNEL_WORDS, **self._kind
            )

    def lanes(self) -> torch.Tensor:
        """(T, 2) int64, once all are summed."""
        return self._partial.sum(dim=1)


def on_gpu(rows: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """A table of a kernel, int64, without a wait for the device."""
    return torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


def sum128_at(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """As `sum128`, of a contiguous tensor whose elements, of 2 bytes or more, have places `at` (N,) in a larger one."""
    words, halves = _words(tensor), tensor.itemsize // 2
    if halves > 1:
        at = (at[:, None] * halves + torch.arange(halves, device=at.device)).reshape(-1)
    z = (words.long() & 0xFFFF) + (at + 1) * _signed(GOLDEN)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    z ^= _shifted(z, 31)
    return torch.stack([z.sum(), ((z ^ _shifted(z, 29)) * _signed(SPREAD)).sum()])


def sum128_rows(rows: torch.Tensor, first_words: NDArray[np.uint64]) -> torch.Tensor:
    """As `sum128`, of contiguous rows (N, W) on a CPU, each a run of a larger tensor from its `first_words` (N,) on."""
    words = rows.view(torch.int16).numpy().view(np.uint16)
    num_rows, width = words.shape
    at_once = max(1, BLOCK_WORDS // max(1, width))
    columns = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    starts = first_words * np.uint64(GOLDEN)
    lanes, room = np.zeros(2, dtype=np.uint64), np.empty((2, at_once * width), dtype=np.uint64)
    for first in range(0, num_rows, at_once):
        block = words[first : first + at_once]
        z, spare = room[:, : block.size]
        places = z.reshape(block.shape)
        np.add(starts[first : first + at_once, None], columns, out=places)
        places += block
        lanes += sums_of(z, spare)[0]
    return torch.from_numpy(lanes.view(np.int64))


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted right as unsigned numbers."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def digest_bytes(lanes: torch.Tensor) -> bytes:
    """The 16 bytes of a digest: lane 0, then lane 1, little-endian."""
    return lanes.cpu().numpy().astype("<i8").tobytes()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """(W,) int16 view of the bytes; a copy only where a byte must be added."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat.view(torch.int16)


def _on_cpu(words: NDArray[np.uint16], first_word: int) -> NDArray[np.uint64]:
    lanes = np.zeros(2, dtype=np.uint64)
    places = np.arange(min(BLOCK_WORDS, len(words)), dtype=np.uint64) * np.uint64(GOLDEN)
    room = np.empty((2, len(places)), dtype=np.uint64)
    for at in range(0, len(words), BLOCK_WORDS):
        block = words[at : at + BLOCK_WORDS]
        z, spare = room[:, : len(block)]
        np.add(places[: len(block)], np.uint64((first_word + at + 1) * GOLDEN % 2**64), out=z)
        z += block
        lanes += sums_of(z, spare)[0]
    return lanes


def sums_of(z: NDArray[np.uint64], spare: NDArray[np.uint64], begins: Sequence[int] = (0,)) -> NDArray[np.uint64]:
    """The lanes (..., S, 2) of the stretches from `begins` (S,) on in `z` (..., W), which is w_i + (i + 1) * GOLDEN.

    `z` and `spare` are written over; with BLOCK_WORDS of them they stay in a core's cache.
    """
    stretches = [slice(begin, end) for begin, end in pairwise([*begins, z.shape[-1]])]

    def totals() -> NDArray[np.uint64]:  # `add.reduceat` would hold the interpreter's lock
        return np.stack([z[..., stretch].sum(axis=-1) for stretch in stretches], axis=-1)

    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z ^= np.right_shift(z, np.uint64(shift), out=spare)
        z *= np.uint64(factor)
    z ^= np.right_shift(z, np.uint64(31), out=spare)
    first = totals()
    z ^= np.right_shift(z, np.uint64(29), out=spare)
    return np.stack([first, totals() * np.uint64(SPREAD)], axis=-1)
