"""The rows of the hub's log, as JSON objects; times are wall-clock seconds, since they outlive the process. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_type_hints

from meshrl.weights.coordinator.engine_groups import EngineGroup
from meshrl.weights.coordinator.states import Key, VersionRecord
from meshrl.wire.types import VersionState
from meshrl.wire.values import JsonObject, from_plain, to_plain

KEPT = (
    "key", "artifact_id", "transport", "adapter", "num_bytes", "root", "layout_signature", "paths", "copy", "copied",
    "state", "revision", "traceparent", "sealed_s", "policy", "min_ready", "answer",
)  # fmt: skip
"""The fields of a version that outlive the hub."""
_TYPES = get_type_hints(VersionRecord)


def hub(epochs: Mapping[str, int], closed: Sequence[str], revision: int) -> JsonObject:
    """The hub's own row: the epoch of each run, and the runs among them that are closed."""
    return {"epochs": dict(epochs), "closed": [*closed], "revision": revision}


def hub_of(row: JsonObject) -> tuple[Mapping[str, int], Sequence[str], int]:
    return row["epochs"], row["closed"], row["revision"]


def version(record: VersionRecord, revision: int, wall_minus_monotonic_s: float) -> JsonObject:
    """The row of a version as of `revision`; one that is being decided is written as decided."""
    as_of: dict[str, object] = {"revision": revision, "sealed_s": record.sealed_s + wall_minus_monotonic_s}
    if record.deciding:
        as_of["state"] = VersionState.COMMITTING
    return {name: to_plain(as_of.get(name, getattr(record, name))) for name in KEPT}


def version_of(row: JsonObject, monotonic_minus_wall_s: float) -> VersionRecord:
    kept = {name: from_plain(_TYPES[name], row[name]) for name in KEPT if name in row}
    record = VersionRecord(**{**kept, "key": Key(*row["key"])})
    record.sealed_s += monotonic_minus_wall_s
    return record


def group(opened: EngineGroup, wall_minus_monotonic_s: float) -> JsonObject:
    return {"group": to_plain(replace(opened, until_s=opened.until_s + wall_minus_monotonic_s))}


def group_of(row: JsonObject, monotonic_minus_wall_s: float) -> EngineGroup:
    opened: EngineGroup = from_plain(EngineGroup, row["group"])
    return replace(opened, until_s=opened.until_s + monotonic_minus_wall_s)
