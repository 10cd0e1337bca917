"""The rows of the hub's log, a JSON object each: the run, its versions and its groups of engines. No I/O.

Times in rows are wall-clock seconds, since they outlive the process.
"""

from __future__ import annotations

import dataclasses

from google.protobuf.json_format import MessageToDict, ParseDict

from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.coordinator.engine_groups import EngineGroup
from meshrl.weights.coordinator.states import VersionRecord
from meshrl.wire import convert
from meshrl.wire.types import Activation, ActivationPolicy, GroupMember, Transport, VersionState
from meshrl.wire.values import JsonObject


def run(run_id: str, epoch: int, revision: int) -> JsonObject:
    return {"run_id": run_id, "epoch": epoch, "revision": revision}


def version(record: VersionRecord, revision: int, wall_minus_monotonic_s: float) -> JsonObject:
    """The row of a version as of `revision`; one whose decision is under way is written as decided."""
    state = VersionState.COMMITTING if record.deciding else record.state
    return {
        "run_id": record.run_id,
        "epoch": record.key[0],
        "version": record.key[1],
        "state": state.value,
        "revision": revision,
        "artifact_id": record.artifact_id,
        "transport": record.transport.value,
        "num_bytes": record.num_bytes,
        "root": record.root.hex(),
        "layout_signature": record.layout_signature.hex(),
        "paths": list(record.paths),
        "traceparent": record.traceparent,
        "sealed_wall_s": record.sealed_s + wall_minus_monotonic_s,
        "policy": record.policy.value,
        "min_ready": record.min_ready,
        "answer": None if record.answer is None else MessageToDict(convert.to_proto(record.answer)),
    }


def version_of(row: JsonObject, monotonic_minus_wall_s: float) -> VersionRecord:
    """Reads a version back."""
    record = VersionRecord(
        run_id=row["run_id"],
        key=(row["epoch"], row["version"]),
        artifact_id=row["artifact_id"],
        transport=Transport(row["transport"]),
        num_bytes=row["num_bytes"],
        root=bytes.fromhex(row["root"]),
        layout_signature=bytes.fromhex(row["layout_signature"]),
        paths=tuple(row["paths"]),
        state=VersionState(row["state"]),
        revision=row["revision"],
        traceparent=row["traceparent"],
        sealed_s=row["sealed_wall_s"] + monotonic_minus_wall_s,
        policy=ActivationPolicy(row["policy"]),
        min_ready=row["min_ready"],
    )
    if row["answer"] is not None:
        record.answer = convert.from_proto(Activation, ParseDict(row["answer"], pb.ActivateVersionResponse()))
    return record


def group(opened: EngineGroup, wall_minus_monotonic_s: float) -> JsonObject:
    return {
        **dataclasses.asdict(opened),
        "until_s": opened.until_s + wall_minus_monotonic_s,
        "members": [[m.engine_id, m.first_receiver, m.num_ranks] for m in opened.members],
    }


def group_of(row: JsonObject, monotonic_minus_wall_s: float) -> EngineGroup:
    """Reads a group back."""
    return EngineGroup(
        generation=row["generation"],
        request_id=row["request_id"],
        epoch=row["epoch"],
        first_version=row["first_version"],
        store_address=row["store_address"],
        backend=row["backend"],
        num_senders=row["num_senders"],
        deadline_s=row["deadline_s"],
        until_s=row["until_s"] + monotonic_minus_wall_s,
        members=tuple(
            GroupMember(engine_id=engine_id, first_receiver=first, num_ranks=ranks)
            for engine_id, first, ranks in row["members"]
        ),
    )
