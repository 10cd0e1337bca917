"""Names that first calls carry both ways: what a peer can do beyond the contract version. docs/contract.md lists
them."""

from __future__ import annotations

REATTACH = "rollouts.reattach"
DRAIN = "drain"
CHECKPOINTS = "checkpoints.list"
MANIFEST_PARTS = "manifest.parts"
COMPILED = "compiled"
FILE_DELTAS = "deltas.files"
COPIES = "broadcasts.copies"
ROW_ORDER = "broadcasts.rows"
PROBES = "versions.probes"
SPARSE_DELTAS = "deltas.sparse"
BROADCAST_DELTAS = "broadcasts.deltas"

ROLLOUT = (REATTACH, DRAIN)
"""Of this repository's rollout service, as those below of its other programs."""

ROLLOUT_CALLER = (REATTACH,)
TRAINER = (DRAIN, CHECKPOINTS)
HUB = (DRAIN, MANIFEST_PARTS, COMPILED, FILE_DELTAS, COPIES, ROW_ORDER, PROBES, BROADCAST_DELTAS)
ENGINE = (SPARSE_DELTAS,)
"""Of every engine's agent; BROADCAST_DELTAS only if it takes them."""
