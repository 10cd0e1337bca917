"""The rows of the hub's log, a JSON object each: the run, its versions and its groups of engines. No I/O.

Times in rows are wall-clock seconds, since they outlive the process.
"""

from __future__ import annotations

import dataclasses

from meshrl.weights.coordinator.engine_groups import EngineGroup
from meshrl.weights.coordinator.states import VersionRecord
from meshrl.wire.types import (
    Activation,
    ActivationPolicy,
    ApplyReport,
    EngineReport,
    GroupMember,
    Transport,
    VersionState,
)
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
        "answer": None if record.answer is None else _answer_row(record.answer),
    }


def _answer_row(answer: Activation) -> JsonObject:
    engines = [
        {"engine_id": engine.engine_id, **vars(engine.applied), "root": engine.applied.root.hex()}
        for engine in answer.engines
    ]
    return {"engines": engines, "commit_s": answer.commit_s, "lag_s": answer.lag_s}


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
        record.answer = with_state(_answer(record, row["answer"]), VersionState.COMMITTED)
    return record


def _answer(record: VersionRecord, row: JsonObject) -> Activation:
    engines = tuple(
        EngineReport(
            engine_id=item["engine_id"],
            applied=ApplyReport(
                version=item["version"],
                root=bytes.fromhex(item["root"]),
                pause_s=item["pause_s"],
                prepare_s=item["prepare_s"],
                requests_kept=item["requests_kept"],
            ),
        )
        for item in row["engines"]
    )
    return Activation(version=record.info(), engines=engines, commit_s=row["commit_s"], lag_s=row["lag_s"])


def with_state(answer: Activation, state: VersionState) -> Activation:
    """Returns the answer with the version in `state`."""
    return dataclasses.replace(answer, version=dataclasses.replace(answer.version, state=state))


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
