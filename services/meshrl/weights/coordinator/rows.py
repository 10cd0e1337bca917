"""The rows of the hub's log, a JSON object each: the run, its versions and its groups of engines. No I/O.

Times in rows are wall-clock seconds, since they outlive the process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_type_hints

from meshrl.weights.coordinator.engine_groups import EngineGroup
from meshrl.weights.coordinator.states import VersionRecord
from meshrl.wire.types import VersionState
from meshrl.wire.values import JsonObject, from_plain, to_plain

KEPT = (
    "run_id", "key", "artifact_id", "transport", "num_bytes", "root", "layout_signature", "paths", "state", "revision",
    "traceparent", "sealed_s", "policy", "min_ready", "answer",
)  # fmt: skip
"""The fields of a version that outlive the hub."""
_TYPES = get_type_hints(VersionRecord)


def run(run_id: str, epoch: int, revision: int) -> JsonObject:
    return {"run_id": run_id, "epoch": epoch, "revision": revision}


def version(record: VersionRecord, revision: int, wall_minus_monotonic_s: float) -> JsonObject:
    """The row of a version as of `revision`; one whose decision is under way is written as decided."""
    as_of: dict[str, object] = {"revision": revision, "sealed_s": record.sealed_s + wall_minus_monotonic_s}
    if record.deciding:
        as_of["state"] = VersionState.COMMITTING
    return {name: to_plain(as_of.get(name, getattr(record, name))) for name in KEPT}


def version_of(row: JsonObject, monotonic_minus_wall_s: float) -> VersionRecord:
    """Reads a version back."""
    record = VersionRecord(**{name: from_plain(_TYPES[name], row[name]) for name in KEPT})
    record.sealed_s += monotonic_minus_wall_s
    return record


def group(opened: EngineGroup, wall_minus_monotonic_s: float) -> JsonObject:
    return {"group": to_plain(replace(opened, until_s=opened.until_s + wall_minus_monotonic_s))}


def group_of(row: JsonObject, monotonic_minus_wall_s: float) -> EngineGroup:
    """Reads a group back."""
    opened: EngineGroup = from_plain(EngineGroup, row["group"])
    return replace(opened, until_s=opened.until_s + monotonic_minus_wall_s)
