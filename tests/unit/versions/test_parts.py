"""What leads to a delta is found in the spool."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.deltas import chains
from meshrl.versions.deltas.chains import MANIFEST
from meshrl.versions.deltas.codec import Rows, encode, write_stream
from meshrl.versions.store import VersionStore
from meshrl.wire.manifest import (
    SUM128,
    artifact_id,
    build_manifest,
    chunks_of,
    delta_manifest,
    entries_of,
    plan_tensors,
)
from meshrl.wire.manifest_file import to_json
from meshrl.wire.types import Manifest, TensorEntry, Transport


def test_a_start_finds_the_parts_that_the_one_before_has_named(tmp_path: Path) -> None:
    tensors, chunks = entries_of(memoryview(b"abcd"), plan_tensors([("w", "uint8", (4,))]), 4096)
    part = build_manifest(
        run_id="r", epoch=1, version=3, transport=Transport.STREAM, tensors=tensors, chunks=chunks
    )  # fmt: skip
    for name in ("damaged", "live", "retired"):
        (tmp_path / name / "base").mkdir(parents=True)
        manifest = replace(part, run_id=name)
        (tmp_path / name / "base" / MANIFEST).write_bytes(to_json(manifest) if name != "damaged" else b"{")
    store = VersionStore(tmp_path)
    store.prepare({"damaged", "live"})
    assert store.part(artifact_id(replace(part, run_id="live"))) == replace(part, run_id="live")
    assert store.part(artifact_id(replace(part, run_id="retired"))) is None


def test_deltas_are_merged_unless_one_of_them_changed_at_rest(tmp_path: Path) -> None:
    weights = np.zeros((4, 4096), dtype=np.uint16)
    for version in range(1, 4):
        weights[version] = weights[version - 1]
        weights[version, version::64] += 1
    manifests, folder = list[Manifest](), tmp_path
    with ThreadPoolExecutor(1) as threads:
        for version, state in enumerate(weights):
            stream = state.view(np.uint8)
            tensor = TensorEntry(
                name="w", dtype="bfloat16", shape=(4096,), offset=0, num_bytes=8192,
                digest=digest_bytes(sum128(torch.from_numpy(stream))),
            )  # fmt: skip
            full = build_manifest(
                run_id="r", epoch=1, version=version, transport=Transport.STREAM, tensors=(tensor,),
                chunks=chunks_of(stream.data, 4096),
            )  # fmt: skip
            payload, manifest = stream, replace(full, digest_algorithm=SUM128)
            if manifests:
                rows = Rows((tensor,), [(0, 8192)])
                payload = write_stream(
                    [made for _, made in encode(rows, weights[version - 1].view(np.uint8), stream, threads)]
                )
                manifest = delta_manifest(manifests[-1], manifest, chunks_of(payload.data, 4096))
            folder = tmp_path / str(version)
            folder.mkdir()
            if manifests:
                chains.link_base(chains.chain_of(manifests[-1], tmp_path / str(version - 1)), folder)
            (folder / MANIFEST).write_bytes(to_json(manifest))
            (folder / chains.PAYLOAD).write_bytes(payload.tobytes())
            manifests.append(manifest)
    chain = list(chains.chain_of(manifests[-1], folder).values())
    shutil.copytree(folder, tmp_path / "damaged", copy_function=shutil.copyfile)
    damaged = tmp_path / "damaged" / "base" / chains.PAYLOAD
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])

    (merged,) = chains.steps_to(chain, manifests[0].result_root, whole=True)
    assert merged.manifest.base_root == manifests[0].result_root
    assert merged.manifest.result_root == manifests[-1].result_root
    chain = list(chains.chain_of(manifests[-1], tmp_path / "damaged").values())
    assert [part.manifest.version for part in chains.steps_to(chain, manifests[0].result_root, whole=True)] == [1, 2, 3]
