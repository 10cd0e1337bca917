"""A version's file written in shares: the bytes, and the digests that the shares add up to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from meshrl.trainer.version_file import VersionFile
from meshrl.wire.manifest import StreamHasher, plan_tensors

PLANS = plan_tensors(
    [("a", "float32", (700, 3)), ("b", "bfloat16", (5,)), ("c", "uint8", (4097,)), ("d", "int8", (0,))]
)
DATA = np.random.default_rng(0).integers(0, 256, sum(plan.num_bytes for plan in PLANS), dtype=np.uint8)


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_shares_make_the_file_and_the_digests_of_one_writer(tmp_path: Path, shares: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        files = [
            VersionFile(tmp_path, version=3, epoch=1, plans=PLANS, chunk_bytes=4096, threads=threads, num_threads=2)
            for _ in range(shares)
        ]
        files[0].begin()
        edges = [len(DATA) * share // shares for share in range(shares + 1)]
        for file, start, end in zip(files, edges, edges[1:], strict=False):
            file.write([(start, DATA[start:end].data)])
        tensors, chunks = {}, {}
        for share, file in enumerate(files):
            hashed = file.hash(share, shares)
            assert not tensors.keys() & hashed[0].keys()
            tensors |= hashed[0]
            chunks |= hashed[1]
    expected = StreamHasher(PLANS, 4096)
    expected.update(DATA.data)
    assert files[0].entries(tensors, chunks) == expected.entries()
    written = files[0].path.with_suffix(".tmp").read_bytes()
    assert written[-len(DATA) :] == DATA.tobytes()


def test_file_of_an_attempt_before_is_written_anew(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        file = VersionFile(tmp_path, version=3, epoch=1, plans=PLANS, chunk_bytes=4096, threads=threads, num_threads=1)
        file.path.parent.mkdir()
        left_over = file.path.with_suffix(".tmp")
        left_over.write_bytes(b"x" * 2 * len(DATA))
        file.begin()
        assert left_over.read_bytes()[-len(DATA) :] == bytes(len(DATA))
