"""Which versions leave as deltas."""

from __future__ import annotations

from meshrl.versions.deltas.rule import DeltaRule
from meshrl.wire.manifest import build_manifest
from meshrl.wire.types import Manifest, TensorEntry, Transport

TENSORS = (TensorEntry(name="w", dtype="float32", shape=(2,), offset=0, num_bytes=8, digest=bytes(16)),)


def in_full(version: int) -> Manifest:
    return build_manifest(
        run_id="run", epoch=1, version=version, transport=Transport.STREAM, tensors=TENSORS, chunks=()
    )


def test_no_delta_is_made_of_an_anchor() -> None:
    rule, based = DeltaRule(anchor_every=2), []
    for version in range(7):
        base = rule.base_of(version, TENSORS)
        based.append(None if base is None else base.version)
        full = in_full(version)
        rule.delivered(full if base is None else in_full(version), full)
    assert based == [None, 0, 1, None, 3, 4, None]
