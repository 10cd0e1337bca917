"""What leads to a delta is found in the spool, also while versions are retired that lie beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshrl.versions import store as stores
from meshrl.versions.deltas.chains import MANIFEST
from meshrl.versions.store import VersionStore
from meshrl.wire.manifest import artifact_id, build_manifest, entries_of, plan_tensors
from meshrl.wire.manifest_file import to_json
from meshrl.wire.types import Manifest, Transport


def test_a_part_is_found_while_the_folders_around_it_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, chunks = entries_of(memoryview(b"abcd"), plan_tensors([("w", "uint8", (4,))]), 4096)
    part = build_manifest(
        run_id="r", epoch=1, version=3, transport=Transport.STREAM, tensors=tensors, chunks=chunks
    )  # fmt: skip
    spool = tmp_path / "spool"
    for name in ("one", "other", "another"):
        (spool / name / "below").mkdir(parents=True)
        (spool / name / "below" / MANIFEST).write_bytes(to_json(part))

    def read_and_retired(text: bytes) -> Manifest:
        shutil.rmtree(spool, ignore_errors=True)
        return stores_from_json(text)

    stores_from_json = stores.from_json
    monkeypatch.setattr(stores, "from_json", read_and_retired)
    assert VersionStore(spool).part(artifact_id(part)) == part
