"""What leads to a delta stays in the spool as long as the delta, also over restarts of the hub."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.deltas import chains
from meshrl.versions.deltas.chains import MANIFEST
from meshrl.versions.deltas.codec import Rows, encode, write_stream
from meshrl.versions.store import RETIRED, VersionStore
from meshrl.versions.version_bytes import PAYLOAD, chunk_of
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import (
    SUM128,
    artifact_id,
    build_manifest,
    chunks_of,
    delta_manifest,
)
from meshrl.wire.manifest_file import to_json
from meshrl.wire.types import Manifest, TensorEntry, Transport


def made_in(folder: Path) -> list[Manifest]:
    """A version in full and three deltas, each from the one before, in folders by their number."""
    weights = np.zeros((4, 4096), dtype=np.uint16)
    for version in range(1, 4):
        weights[version] = weights[version - 1]
        weights[version, version::64] += 1
    manifests = list[Manifest]()
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
            (folder / str(version)).mkdir()
            (folder / str(version) / MANIFEST).write_bytes(to_json(manifest))
            (folder / str(version) / PAYLOAD).write_bytes(payload.tobytes())
            manifests.append(manifest)
    return manifests


def test_what_a_delta_leads_on_from_stays_until_the_delta_is_retired(tmp_path: Path) -> None:
    made, spool = tmp_path / "made", tmp_path / "spool"
    made.mkdir()
    manifests = made_in(made)
    artifacts, store = [artifact_id(manifest) for manifest in manifests], VersionStore(spool)
    for version, artifact in enumerate(artifacts):
        store.check_base(artifact, manifests[version])
        store.open(artifact, manifests[version])
        held, payload = store.held(artifact), (made / str(version) / PAYLOAD).read_bytes()
        for chunk in manifests[version].chunks:
            held.write(chunk_of(chunk.offset, payload[chunk.offset : chunk.offset + chunk.length]))
        if version:
            store.delete(artifacts[version - 1], ())
    unmarked = spool / artifacts[1] / RETIRED  # as of a hub that was killed in between
    unmarked.unlink()
    held_root, last = manifests[0].result_root, artifacts[3]
    (merged,) = store.steps(last, held_root, whole=True)

    store = VersionStore(spool)
    store.prepare({last})
    assert store.part(artifact_id(merged)) == merged
    assert store.steps(last, held_root, whole=True) == (merged,)
    assert store.steps(last, b"", whole=True) == (manifests[0], merged)
    data = b"".join(bytes(chunk.data) for chunk in store.read(artifacts[0], 0, 8192, 8192))
    assert data == (made / "0" / PAYLOAD).read_bytes()
    store.delete(last, ())
    assert list(spool.iterdir()) == []
    assert store.part(artifacts[0]) is store.part(artifact_id(merged)) is None


def test_a_start_deletes_what_was_cut_off_and_leads_to_nothing(tmp_path: Path) -> None:
    manifests = made_in(tmp_path)
    names = [artifact_id(manifest) for manifest in manifests]
    for version, name in enumerate(names):
        (tmp_path / str(version)).rename(tmp_path / name)
    (tmp_path / names[1] / PAYLOAD).write_bytes(b"")
    store = VersionStore(tmp_path)
    store.prepare({names[3]})
    assert [folder.name for folder in tmp_path.iterdir()] == [names[3]]
    with pytest.raises(MeshError, match="the chain of version 3 is gone"):
        store.steps(names[3], b"", whole=True)
    assert store.held(names[3]).missing_offsets() == ()


def test_deltas_are_merged_unless_one_of_them_changed_at_rest(tmp_path: Path) -> None:
    manifests = made_in(tmp_path)

    def steps(folder: Path) -> list[Manifest]:
        chain = [chains.stored(manifest, folder / str(version)) for version, manifest in enumerate(manifests)]
        return [part.manifest for part in chains.steps_to(chain, manifests[0].result_root, whole=True)]

    shutil.copytree(tmp_path, tmp_path / "damaged", copy_function=shutil.copyfile)
    damaged = tmp_path / "damaged" / "2" / PAYLOAD
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    (merged,) = steps(tmp_path)
    assert merged.base_root == manifests[0].result_root
    assert merged.result_root == manifests[-1].result_root
    assert [step.version for step in steps(tmp_path / "damaged")] == [1, 2, 3]
