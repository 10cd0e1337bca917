"""The kernels of GPUs, interpreted by Triton on a CPU, give what the CPU gives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = """
import torch
from meshrl.versions.collective.digest import sum128
from meshrl.versions.collective.digest_kernel import digest_words
from meshrl.versions.deltas.change_kernel import change_words
from meshrl.versions.deltas.on_device import moved_bits

torch.manual_seed(0)
room = torch.randint(-(2**15), 2**15, (20_000,), dtype=torch.int16)
views = [room[16:16], room[32:33], room[64 : 64 + 4096], room[8192:18000]]
places = [0, 7, 2**33 + 1, 5]
for aligned, shift in ((True, 0), (False, 1)):
    parts = [room[v.storage_offset() + shift :][: len(v)] for v in views]
    partial = torch.empty((len(parts), 3, 2), dtype=torch.int64)
    copies = torch.zeros_like(room)
    away = [(p.data_ptr() - partial.data_ptr()) // 2 for p in parts]
    to = (copies.data_ptr() - room.data_ptr()) // 2
    rows = [(at, len(p), first, 0, 0, 0, at + to, 0) for at, p, first in zip(away, parts, places)]
    assert not aligned or all(row[0] % 8 == row[6] % 8 == 0 for row in rows)
    for first, last in ((0, 3), (3, 4)):  # some now, and the rest in a call of their own
        how = {"WORDS": 1024, "ALIGNED": aligned, "IN_ROWS": False, "COPY": aligned}
        digest_words[(last - first, 3)](torch.tensor(rows), partial, first, **how)
    for part in parts if aligned else ():
        there = slice(part.storage_offset(), part.storage_offset() + len(part))
        assert torch.equal(copies[there], part)
        copies[there] = 0
    assert not copies.any()
    expected = torch.stack([sum128(p, first) for p, first in zip(parts, places)])
    assert torch.equal(partial.sum(dim=1), expected), (partial.sum(dim=1), expected)

# many rows in a block, many blocks in a row, and one row; with gaps in memory and in places
shapes = [(300, 7, 9, 21), (3, 4099, 4100, 5000), (1, 1500, 0, 0), (64, 64, 64, 128)]
partial = torch.empty((len(shapes), 3, 2), dtype=torch.int64)
away = (room.data_ptr() - partial.data_ptr()) // 2
copies = [torch.zeros((count, width + 2), dtype=torch.int16) for count, width, *_ in shapes]
rows = [
    (away + 3, count * width, 2**33, width, step, place, (copy.data_ptr() - partial.data_ptr()) // 2 + 1, width + 2)
    for (count, width, step, place), copy in zip(shapes, copies)
]
how = {"WORDS": 1024, "ALIGNED": False, "IN_ROWS": True, "COPY": True}
digest_words[(len(rows), 3)](torch.tensor(rows), partial, 0, **how)
for found, (count, width, step, place), copy in zip(partial.sum(dim=1), shapes, copies):
    held = [room[3 + row * step :][:width] for row in range(count)]
    assert torch.equal(copy[:, 1:-1], torch.stack(held))
    assert not copy[:, 0].any() and not copy[:, -1].any()
    expected = sum(sum128(each, 2**33 + row * place) for row, each in enumerate(held))
    assert torch.equal(found, expected), (count, width)

for dtype, bits in ((torch.int16, 16), (torch.int32, 32)):
    ends = torch.iinfo(dtype)
    held = [torch.randint(ends.min, ends.max, (3000,), dtype=dtype) for _ in range(2)]
    held[0][:4] = torch.tensor([0, -1, ends.min, ends.max], dtype=dtype)
    expected = [each.clone() for each in held]
    at = torch.cat([torch.arange(100, 1500), torch.arange(5000, 6000, 2)])
    steps = torch.randint(-40_000, 40_000, at.shape)
    # the first run lies 100 elements on in the stream, the second in every third element of its parameter
    rows = [(0, 1400, held[0].data_ptr(), 100, 1, 0), (1400, 1900, held[1].data_ptr(), 5000, 3, 2)]
    change_words[(2, 2)](torch.tensor(rows), at, steps, BITS=bits, CHANGES=256)
    for target, (begin, end, _, origin, stride, to) in zip(expected, rows):
        where = (at[begin:end] - origin) * stride + to
        target[where] = moved_bits(target[where], steps[begin:end])
    assert all(map(torch.equal, held, expected)), dtype
"""


def test_kernels_give_what_the_cpu_gives() -> None:
    """Triton must know before it is imported that it interprets."""
    pytest.importorskip("triton", reason="comes with torch for GPUs")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
