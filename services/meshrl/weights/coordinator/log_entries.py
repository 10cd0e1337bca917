"""What the hub writes to its log, and how an entry changes the versions when it is read back. No I/O.

Entries are flat JSON objects with a `kind`. Times in them are wall-clock seconds, since they outlive the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from meshrl.weights.coordinator.engine_groups import EngineGroup
from meshrl.weights.coordinator.states import Key, LogEntry, VersionRecord
from meshrl.wire.types import (
    Activation,
    ActivationPolicy,
    ApplyReport,
    EngineReport,
    GroupMember,
    Transport,
    VersionState,
)


def _entry(kind: str, record: VersionRecord, **fields: object) -> LogEntry:
    return {"kind": kind, "epoch": record.key[0], "version": record.key[1], **fields}


@contextmanager
def _checked(entry: LogEntry) -> Iterator[None]:
    """Raises ValueError for an entry that lacks a field, or is about a version that is not there."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise ValueError(f"log entry {dict(entry)!r} makes no sense here: {error!r}") from error


def epoch(run_id: str, number: int) -> LogEntry:
    return {"kind": "epoch", "run_id": run_id, "epoch": number}


def group(opened: EngineGroup, wall_minus_monotonic_s: float) -> LogEntry:
    return {
        "kind": "group",
        **dataclasses.asdict(opened),
        "until_s": opened.until_s + wall_minus_monotonic_s,
        "members": [[m.engine_id, m.first_receiver, m.num_ranks] for m in opened.members],
    }


def group_of(entry: LogEntry, monotonic_minus_wall_s: float) -> EngineGroup:
    """Reads a group back. Raises ValueError for an entry that does not hold one."""
    with _checked(entry):
        return EngineGroup(
            generation=entry["generation"],
            request_id=entry["request_id"],
            epoch=entry["epoch"],
            first_version=entry["first_version"],
            store_address=entry["store_address"],
            backend=entry["backend"],
            num_senders=entry["num_senders"],
            deadline_s=entry["deadline_s"],
            until_s=entry["until_s"] + monotonic_minus_wall_s,
            members=tuple(
                GroupMember(engine_id=engine_id, first_receiver=first, num_ranks=ranks)
                for engine_id, first, ranks in entry["members"]
            ),
        )


def staged(record: VersionRecord) -> LogEntry:
    return _entry(
        "staged",
        record,
        run_id=record.run_id,
        artifact_id=record.artifact_id,
        transport=record.transport.value,
        num_bytes=record.num_bytes,
        root=record.root.hex(),
        layout_signature=record.layout_signature.hex(),
        paths=list(record.paths),
    )


def sealed(record: VersionRecord, wall_s: float) -> LogEntry:
    return _entry("sealed", record, traceparent=record.traceparent, wall_s=wall_s)


def decided(record: VersionRecord) -> LogEntry:
    return _entry("decided", record, policy=record.policy.value, min_ready=record.min_ready)


def committed(record: VersionRecord, answer: Activation) -> LogEntry:
    return _entry("committed", record, **_fields_of(answer))


def _fields_of(answer: Activation) -> LogEntry:
    engines = [
        {"engine_id": engine.engine_id, **vars(engine.applied), "root": engine.applied.root.hex()}
        for engine in answer.engines
    ]
    return {"engines": engines, "commit_s": answer.commit_s, "lag_s": answer.lag_s}


def aborted(record: VersionRecord, why: str) -> LogEntry:
    return _entry("aborted", record, why=why)


def retired(record: VersionRecord) -> LogEntry:
    return _entry("retired", record)


def snapshot(run_id: str, number: int, revision: int) -> LogEntry:
    """The first entry of a compacted log: the run, its epoch and the last revision. What there is follows."""
    return {"kind": "snapshot", "run_id": run_id, "epoch": number, "revision": revision}


def version(record: VersionRecord, wall_minus_monotonic_s: float) -> LogEntry:
    """Everything that the entries of a version said. A decision under way is not in it: wait until it is durable."""
    return {
        **staged(record),
        "kind": "version",
        "state": record.state.value,
        "revision": record.revision,
        "traceparent": record.traceparent,
        "sealed_wall_s": record.sealed_s + wall_minus_monotonic_s,
        "policy": record.policy.value,
        "min_ready": record.min_ready,
        "answer": None if record.answer is None else _fields_of(record.answer),
    }


def version_of(entry: LogEntry, monotonic_minus_wall_s: float) -> VersionRecord:
    """Reads a version back from a compacted log. Raises ValueError for an entry that does not hold one."""
    with _checked(entry):
        record = _staged(entry)
        record.state, record.revision = VersionState(entry["state"]), entry["revision"]
        record.traceparent = entry["traceparent"]
        record.sealed_s = entry["sealed_wall_s"] + monotonic_minus_wall_s
        record.policy, record.min_ready = ActivationPolicy(entry["policy"]), entry["min_ready"]
        if entry["answer"] is not None:
            record.answer = with_state(_answer(record, entry["answer"]), VersionState.COMMITTED)
    return record


def _staged(entry: LogEntry) -> VersionRecord:
    return VersionRecord(
        run_id=entry["run_id"],
        key=(int(entry["epoch"]), int(entry["version"])),
        artifact_id=entry["artifact_id"],
        transport=Transport(entry["transport"]),
        num_bytes=entry["num_bytes"],
        root=bytes.fromhex(entry["root"]),
        layout_signature=bytes.fromhex(entry.get("layout_signature", "")),
        paths=tuple(entry["paths"]),
    )


def with_state(answer: Activation, state: VersionState) -> Activation:
    """Returns the answer with the version in `state`."""
    return dataclasses.replace(answer, version=dataclasses.replace(answer.version, state=state))


def replay(records: dict[Key, VersionRecord], entry: LogEntry, monotonic_minus_wall_s: float) -> VersionRecord:
    """Applies an entry about a version to `records`; returns the version.

    Raises ValueError for an entry that does not follow from those before it: the log is not one that a hub wrote.
    """
    with _checked(entry):
        kind = entry["kind"]
        key = (int(entry["epoch"]), int(entry["version"]))
        if kind == "staged":
            records[key] = _staged(entry)
            return records[key]
        record = records[key]
        if kind == "sealed":
            record.state, record.traceparent = VersionState.SEALED, entry["traceparent"]
            record.sealed_s = entry["wall_s"] + monotonic_minus_wall_s
        elif kind == "decided":
            record.state = VersionState.COMMITTING
            record.policy, record.min_ready = ActivationPolicy(entry["policy"]), entry["min_ready"]
        elif kind == "committed":
            record.state = VersionState.COMMITTED
            record.answer = _answer(record, entry)
        elif kind in ("aborted", "retired"):
            record.state = VersionState(kind)
        else:
            raise ValueError(f"unknown kind {kind!r}; the log was written by a newer version of this program")
    return record


def _answer(record: VersionRecord, entry: LogEntry) -> Activation:
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
        for item in entry["engines"]
    )
    return Activation(version=record.info(), engines=engines, commit_s=entry["commit_s"], lag_s=entry["lag_s"])
