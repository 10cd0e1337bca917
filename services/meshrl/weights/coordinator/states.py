"""The hub's records of versions and engines, the legal moves of a version, and the coordinator's actions.

Plain data without I/O. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshrl.client.backoff import Backoff
from meshrl.wire.errors import MeshError
from meshrl.wire.types import (
    Activation,
    ActivationPolicy,
    AgentCommand,
    AgentFault,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    Manifest,
    ServedVersion,
    Transport,
    VersionInfo,
    VersionKind,
    VersionState,
)
from meshrl.wire.values import JsonObject


class Key(NamedTuple):
    """Names a version. A later epoch supersedes every version of an earlier one."""

    run_id: str
    epoch: int
    version: int


TRANSITIONS: Mapping[VersionState, frozenset[VersionState]] = {
    VersionState.STAGING: frozenset({VersionState.SEALED, VersionState.ABORTED}),
    VersionState.SEALED: frozenset({VersionState.COMMITTING, VersionState.ABORTED}),
    # RETIRED at once when a newer version is committed before enough engines served this one.
    VersionState.COMMITTING: frozenset({VersionState.COMMITTED, VersionState.RETIRED}),
    VersionState.COMMITTED: frozenset({VersionState.RETIRED}),
    VersionState.RETIRED: frozenset(),
    VersionState.ABORTED: frozenset(),
}
UNDECIDED = frozenset({VersionState.STAGING, VersionState.SEALED})
DECIDED = frozenset({VersionState.COMMITTING, VersionState.COMMITTED})
LIVE = UNDECIDED | DECIDED
# In these states an engine serves the version it reports; while applying, requests wait.
SERVING = frozenset({AgentState.READY, AgentState.FETCHING, AgentState.PREPARED, AgentState.APPLYING})


@dataclass(kw_only=True)
class Attempt:
    min_ready: int
    policy: ActivationPolicy
    deadline_s: float
    required: frozenset[str]  # engines live at the call: with min_ready 0 each of them must have prepared
    faults: dict[str, AgentFault] = field(default_factory=dict)  # since the call


@dataclass(kw_only=True)
class VersionRecord:
    key: Key
    artifact_id: str
    transport: Transport
    adapter: bool = False  # it changes no base weights, so engines serve it beside those of other runs
    num_bytes: int
    root: bytes
    layout_signature: bytes = b""
    paths: tuple[str, ...] = ()
    copy: str = ""  # artifact of the same weights in chunks, for engines that missed the broadcast of this one
    copied: bool = False  # all bytes of that are here
    state: VersionState = VersionState.STAGING
    revision: int = 0
    traceparent: str = ""
    sealed_s: float = 0.0
    attempt: Attempt | None = None
    arriving: bool = False  # its bytes come in, and engines may fetch those that are here
    deciding: bool = False  # the decision is on its way to the log
    policy: ActivationPolicy = ActivationPolicy.ROLLING
    min_ready: int = 0
    decided_s: float = 0.0
    commit_deadline_s: float = 0.0
    commit_set: set[str] = field(default_factory=set)  # prepared at the decision, outcome not known yet
    gang: set[str] = field(default_factory=set)  # must all have applied before any resumes
    held: set[str] = field(default_factory=set)  # applied and waiting for the gang
    released: bool = False
    reports: dict[str, ApplyReport] = field(default_factory=dict)
    answer: Activation | None = None

    @property
    def version(self) -> int:
        return self.key.version

    @property
    def artifacts(self) -> list[str]:
        return [self.artifact_id, self.copy] if self.copy else [self.artifact_id]

    def takes(self, artifact: str) -> bool:
        """Whether bytes of an artifact are still to come."""
        return not self.copied if artifact == self.copy else self.state is VersionState.STAGING

    @property
    def busy(self) -> bool:
        """Whether a call waits for this version to be decided."""
        return self.deciding or (self.attempt is not None and self.state is VersionState.SEALED)

    def info(self, wall_offset_s: float | None = None) -> VersionInfo:
        """With the time of its seal if the offset of the wall clock is given."""
        return VersionInfo(
            run_id=self.key.run_id,
            epoch=self.key.epoch,
            version=self.key.version,
            artifact_id=self.artifact_id,
            state=self.state,
            num_bytes=self.num_bytes,
            transport=self.transport,
            traceparent=self.traceparent,
            seal_time=None if wall_offset_s is None or not self.sealed_s else self.sealed_s + wall_offset_s,
        )

    def decision(self) -> Activation:
        """The commit's outcome so far, once it is decided."""
        return self.answer or Activation(version=self.info(), engines=(), commit_s=0.0, lag_s=0.0)

    @classmethod
    def staged(cls, manifest: Manifest, artifact: str) -> VersionRecord:
        return cls(
            key=Key(manifest.run_id, manifest.epoch, manifest.version),
            artifact_id=artifact,
            transport=manifest.transport,
            adapter=manifest.kind is VersionKind.LORA,
            num_bytes=manifest.payload_bytes,
            root=manifest.result_root,
            layout_signature=manifest.layout_signature,
            paths=tuple(file.path for file in manifest.files),
        )


@dataclass(kw_only=True, eq=False)
class EngineLine:
    """One engine on the line of one run: its last report, and the last command."""

    engine: EngineRecord
    state: AgentState = AgentState.JOINING
    serving: int | None = None
    root: bytes = b""
    prepared: str | None = None  # artifact in its shadow
    sent: AgentCommand | None = None  # last command sent on the current stream
    sent_key: Key | None = None  # version of the last prepare or commit
    last_fault: AgentFault | None = None
    faulted: set[Key] = field(default_factory=set)  # versions it could not prepare or apply
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 30.0, jitter=0.0))
    retry_s: float | None = None  # when to send the commit again after a fault
    ejected: bool = False  # failed a decided version and serves no newer one yet

    @property
    def engine_id(self) -> str:
        return self.engine.engine_id

    def try_again(self, key: Key) -> None:
        """Forgets that the engine failed with a version."""
        self.faulted.discard(key)
        self.sent = None

    def serves(self, record: VersionRecord) -> bool:
        return self.serving == record.version and self.root == record.root


@dataclass(kw_only=True, eq=False)
class EngineRecord:
    registration: AgentRegistration
    lease_id: str
    seen_s: float
    connected: bool = False
    lines: dict[str, EngineLine] = field(default_factory=dict)  # by run
    served: tuple[ServedVersion, ...] = ()  # every version that it holds, where it lists them
    retired: set[ServedVersion] = field(default_factory=set)  # those of closed runs that it was told to let go of
    group_generation: int | None = None  # group that it says it is in
    newest_generation: int = 0  # newest group that it ever was in
    join_sent: int = 0  # last group that it was told to join on the current stream
    sleeping: bool = False
    sleep_answered: int | None = None  # last Sleep of the current stream that it carried out or declined

    @property
    def engine_id(self) -> str:
        return self.registration.engine_id

    def on(self, run_id: str) -> EngineLine:
        """Until the engine reports about a run, it serves what it registered with."""
        line = self.lines.get(run_id)
        if line is None:
            given = self.registration
            first = self.lines.pop("", None)  # reported before the hub had any run
            line = first or EngineLine(engine=self, serving=given.held_version, root=given.held_root)
            self.lines[run_id] = line
        return line

    def fits(self, record: VersionRecord) -> bool:
        return record.layout_signature in (b"", self.registration.layout_signature)


class VersionRecords(Mapping[Key, VersionRecord]):
    """The versions of one line, by key: those that may still be served, and those that ended lately.

    An agent's report looks at `live` alone, so that its cost does not grow. Only `move` changes a state.
    """

    def __init__(self) -> None:
        self._all: dict[Key, VersionRecord] = {}
        self._live: dict[Key, VersionRecord] = {}

    def __getitem__(self, key: Key) -> VersionRecord:
        return self._all[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def live(self) -> Collection[VersionRecord]:
        return self._live.values()

    def add(self, record: VersionRecord) -> None:
        """Adds a version; one that was aborted makes way for it."""
        self._all[record.key] = record
        self._live.pop(record.key, None)
        if record.state in LIVE:
            self._live[record.key] = record

    def move(self, record: VersionRecord, state: VersionState) -> None:
        """Raises AssertionError for a move that is not in TRANSITIONS."""
        if state not in TRANSITIONS[record.state]:
            raise AssertionError(f"version {record.key} cannot go from {record.state.value} to {state.value}")
        record.state = state
        if state not in LIVE:
            del self._live[record.key]

    def newest_decided(self) -> VersionRecord | None:
        return max((r for r in self._live.values() if r.state in DECIDED), key=lambda r: r.key, default=None)

    def target_of(self, engine: EngineLine, report: AgentReport) -> VersionRecord | None:
        """The version of a report, by its artifact, since epochs share version numbers."""
        sent = self.get(engine.sent_key) if engine.sent_key is not None else None
        artifact = report.target_artifact_id
        if report.target_version is None:
            return None
        if sent is not None and sent.version == report.target_version and artifact in ("", sent.artifact_id):
            return sent
        named = (r for r in self.values() if r.artifact_id == artifact and r.version == report.target_version)
        return next(named, None)

    def forget(self, *, keep: int, needed: Callable[[VersionRecord], bool]) -> list[Key]:
        """Drops versions that ended before the last `keep` that did, but for those `needed`."""
        ended = sorted((r for r in self._all.values() if r.state not in LIVE), key=lambda r: r.revision, reverse=True)
        gone = [record.key for record in ended[keep:] if not needed(record)]
        for key in gone:
            del self._all[key]
        return gone


# --- actions, carried out in the order given -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Save:
    """Write rows to the log, all or none, and make them durable, then wake the watchers; after a decision call
    `Coordinator.decided`.

    `versions` and `groups` are the changed rows, None for a forgotten one; `run` is the row of the hub itself. Where
    they need not outlive a power cut, nothing waits for the disk: a later hub gets them from publishers and engines.
    """

    run: JsonObject
    versions: Mapping[Key, JsonObject | None] = field(default_factory=dict)
    groups: Mapping[int, JsonObject | None] = field(default_factory=dict)
    decision: Key | None = None
    committed: Activation | None = None
    outlives_power_cut: bool = True


@dataclass(frozen=True, kw_only=True)
class Send:
    """Give an engine a command over the session of its lease."""

    engine_id: str
    lease_id: str
    command: AgentCommand


@dataclass(frozen=True, kw_only=True)
class EndSession:
    """Close the session of a lease."""

    lease_id: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer all calls of ActivateVersion for this version."""

    key: Key
    result: Activation | MeshError


@dataclass(frozen=True, kw_only=True)
class DeleteBytes:
    """Delete the bytes of an artifact; `paths` are files of its publisher that no other version needs."""

    artifact_id: str
    paths: tuple[str, ...] = ()


Action = Save | Send | EndSession | Answer | DeleteBytes
