"""What a peer can do beyond the fields of the contract version: the names that first calls carry both ways.

docs/contract.md lists them.
"""

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
"""Of this repository's rollout service. Those below are of its other programs."""

ROLLOUT_CALLER = (REATTACH,)
TRAINER = (DRAIN, CHECKPOINTS)
HUB = (DRAIN, MANIFEST_PARTS, COMPILED, FILE_DELTAS, COPIES, ROW_ORDER, PROBES, BROADCAST_DELTAS)
ENGINE = (SPARSE_DELTAS,)
"""Of the agent of every engine here; that of an engine which takes them lists BROADCAST_DELTAS, too."""
