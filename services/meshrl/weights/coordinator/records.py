"""The versions that a hub knows: those that may still be served, and those that ended lately. No I/O.

The cost of an agent's report must not grow with the number of versions that ever were. So the work for each report
looks at `live` alone, and versions that ended are forgotten after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from meshrl.weights.coordinator.states import DECIDED, LIVE, TRANSITIONS, EngineRecord, Key, VersionRecord
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentReport, VersionState


class VersionRecords(Mapping[Key, VersionRecord]):
    """Versions by key. States are changed by `move` only, which keeps `live` right."""

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
        """The versions that are not retired or aborted."""
        return self._live.values()

    def add(self, record: VersionRecord) -> None:
        """Adds a version; one that was aborted makes way for it."""
        self._all[record.key] = record
        self._live.pop(record.key, None)
        if record.state in LIVE:
            self._live[record.key] = record

    def move(self, record: VersionRecord, state: VersionState) -> None:
        """Changes a version's state. Raises AssertionError for a move that is not in TRANSITIONS."""
        if state not in TRANSITIONS[record.state]:
            raise AssertionError(f"version {record.key} cannot go from {record.state.value} to {state.value}")
        record.state = state
        if state not in LIVE:
            del self._live[record.key]

    def newest_decided(self) -> VersionRecord | None:
        """The version that every engine should serve."""
        return max((r for r in self._live.values() if r.state in DECIDED), key=lambda r: r.key, default=None)

    def by_artifact(self, artifact_id: str) -> VersionRecord:
        """The version of an artifact whose bytes are kept. Raises UNKNOWN_VERSION."""
        for record in self.live:
            if record.artifact_id == artifact_id:
                return record
        raise MeshError(Reason.UNKNOWN_VERSION, f"artifact {artifact_id} is unknown or retired; fetch a newer version")

    def target_of(self, engine: EngineRecord, report: AgentReport) -> VersionRecord | None:
        """The version that a report is about; its artifact decides, since epochs share version numbers."""
        sent = self.get(engine.sent_key) if engine.sent_key is not None else None
        artifact = report.target_artifact_id
        if report.target_version is None:
            return None
        if sent is not None and sent.version == report.target_version and artifact in ("", sent.artifact_id):
            return sent
        named = (r for r in self.values() if r.artifact_id == artifact and r.version == report.target_version)
        return next(named, None)

    def forget(self, *, keep: int, needed: Callable[[VersionRecord], bool]) -> list[Key]:
        """Drops what ended before the last `keep` versions that did, but for those that are `needed`."""
        ended = sorted((r for r in self._all.values() if r.state not in LIVE), key=lambda r: r.revision, reverse=True)
        gone = [record.key for record in ended[keep:] if not needed(record)]
        for key in gone:
            del self._all[key]
        return gone
