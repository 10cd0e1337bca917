"""A version's files written in shares: the bytes, and the digests that the shares add up to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshrl.versions.progress import Progress
from meshrl.versions.transports import filesystem
from meshrl.versions.transports.filesystem import VersionFiles
from meshrl.wire.manifest import build_manifest, entries_of, plan_tensors
from meshrl.wire.manifest_file import PayloadReader, from_json, manifest_path
from meshrl.wire.types import Transport

PLANS = plan_tensors(
    [
        ("a", "float32", (700, 3)),
        ("b", "float16", (5,)),
        ("c", "uint8", (4097,)),
        ("d", "int8", (0,)),
        ("e", "int32", (900,)),
        ("f", "int8", (0, 3)),
    ]
)
DATA = np.random.default_rng(0).integers(0, 256, sum(plan.num_bytes for plan in PLANS), dtype=np.uint8)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "FILE_BYTES", 4000)


def files_in(
    folder: Path, threads: ThreadPoolExecutor, num_threads: int, progress: Progress | None = None
) -> VersionFiles:
    return VersionFiles(
        folder, version=3, epoch=1, tensors=PLANS, chunk_bytes=4096, threads=threads, num_threads=num_threads,
        progress=progress or Progress(),
    )  # fmt: skip


def test_writing_and_hashing_are_progress(tmp_path: Path) -> None:
    progress = Progress()
    with ThreadPoolExecutor(2) as threads:
        files = files_in(tmp_path, threads, 2, progress)
        files.begin()
        made_s = progress.moved_s
        files.write([(0, DATA.data)])
        written_s = progress.moved_s
        files.hash(0, 1)
    assert made_s < written_s < progress.moved_s


@pytest.mark.parametrize(("num_threads", "count"), [(1, 1), (2, 2), (8, 3)])
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_shares_make_the_files_and_the_digests_of_one_writer(
    tmp_path: Path, shares: int, num_threads: int, count: int
) -> None:
    with ThreadPoolExecutor(2) as threads:
        writers = [files_in(tmp_path, threads, num_threads) for _ in range(shares)]
        writers[0].begin()
        edges = [len(DATA) * share // shares for share in range(shares + 1)]
        for writer, start, end in zip(writers, edges, edges[1:], strict=False):
            writer.write([(start, DATA[start:end].data)])
        tensors, chunks = {}, {}
        for share, writer in enumerate(writers):
            hashed = writer.hash(share, shares)
            assert not tensors.keys() & hashed[0].keys()
            tensors |= hashed[0]
            chunks |= hashed[1]
    listed = tuple(replace(plan, digest=tensors[i]) for i, plan in enumerate(PLANS)), writers[0].listed(chunks)
    assert listed == entries_of(DATA.data, PLANS, 4096)
    manifest = build_manifest(
        run_id="run", epoch=1, version=3, transport=Transport.FILESYSTEM, tensors=listed[0], chunks=listed[1],
        files=writers[0].entries,
    )  # fmt: skip
    writers[0].finish(manifest)
    assert len(manifest.files) == count
    with PayloadReader(manifest.files) as reader:
        assert reader.read(0, len(DATA)) == DATA.tobytes()
    assert all(from_json(manifest_path(Path(file.path)).read_bytes()) == manifest for file in manifest.files)


def test_each_file_holds_whole_tensors_under_their_names(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        writer = files_in(tmp_path, threads, 8)
        writer.begin()
        writer.write([(0, DATA.data)])
        paths = [Path(entry.path) for entry in writer.entries]
        for path in paths:
            path.with_suffix(".tmp").rename(path)
    assert [path.name for path in paths] == [f"weights-e1-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    found = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert found.keys() == {plan.name for plan in PLANS}
    for plan in PLANS:
        assert found[plan.name].shape == plan.shape
        assert found[plan.name].tobytes() == DATA[plan.offset : plan.offset + plan.num_bytes].tobytes()


def test_file_of_an_attempt_before_is_written_anew(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        writer = files_in(tmp_path, threads, 1)
        left_over = Path(writer.entries[0].path).with_suffix(".tmp")
        left_over.parent.mkdir()
        left_over.write_bytes(b"x" * 2 * len(DATA))
        writer.begin()
        assert left_over.read_bytes()[-len(DATA) :] == bytes(len(DATA))


def test_a_folder_that_the_hub_finds_empty_and_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, removed = Path.mkdir, []

    def mkdir(folder: Path, *how: Any, **more: Any) -> None:
        make(folder, *how, **more)
        if folder.name == "step_3" and len(removed) < 2:  # the hub is at it at this very moment
            folder.rmdir()
            removed.append(folder)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with ThreadPoolExecutor(2) as threads:
        files = files_in(tmp_path, threads, 2)
        files.begin()
    assert len(removed) == 2
    assert [Path(entry.path).with_suffix(".tmp").exists() for entry in files.entries] == [True, True]
