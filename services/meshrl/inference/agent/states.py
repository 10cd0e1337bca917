"""The agent's rules as a state machine: hub commands and results of actions in, actions out. No I/O, no clock.

`JOINING -> SEEDING -> READY(v) -> FETCHING(w) -> PREPARED(w) -> APPLYING(w) -> READY(w)`. A fault while fetching goes
back to the start; a fault while applying goes to POISONED, from where only a fully fetched, verified and applied
version leads back to READY. An artifact is applied only after its fetch was verified and its commit arrived.

Each run of the hub has these states of its own (`LineMachine`). Groups of the nccl transport and sleep are independent
of them: an engine that sleeps is READY, and a request or a version wakes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    Abort,
    AgentCommand,
    AgentFault,
    AgentState,
    ApplyReport,
    Commit,
    DrainAgent,
    JoinGroup,
    Prepare,
    Resume,
    Retire,
    Sleep,
)

# A fetch that is abandoned for a newer one passes through the state it started from.
TRANSITIONS: Mapping[AgentState, frozenset[AgentState]] = {
    AgentState.JOINING: frozenset({AgentState.SEEDING}),
    AgentState.SEEDING: frozenset({AgentState.PREPARED, AgentState.JOINING, AgentState.POISONED}),
    AgentState.READY: frozenset({AgentState.FETCHING}),
    AgentState.FETCHING: frozenset({AgentState.PREPARED, AgentState.READY}),
    AgentState.PREPARED: frozenset({AgentState.APPLYING, AgentState.READY, AgentState.JOINING, AgentState.POISONED}),
    AgentState.APPLYING: frozenset({AgentState.READY, AgentState.POISONED}),
    AgentState.POISONED: frozenset({AgentState.SEEDING}),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    version: int
    artifact_id: str
    committed: bool = False  # the hub decided it
    hold: bool = False


# --- actions, carried out in the order given -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartFetch:
    """Fetch, verify and stage an artifact; then `fetched` or `fetch_failed`. Ends the fetch before it."""

    run_id: str = ""
    version: int
    artifact_id: str


@dataclass(frozen=True, kw_only=True)
class CancelFetch:
    run_id: str = ""


@dataclass(frozen=True, kw_only=True)
class StartApply:
    """Pause, apply what is staged and, unless `hold`, resume; then `applied` or `apply_failed`.

    An adapter of a run is applied without a pause.
    """

    run_id: str = ""
    version: int
    artifact_id: str
    hold: bool


@dataclass(frozen=True, kw_only=True)
class ResumeEngine:
    run_id: str = ""


@dataclass(frozen=True, kw_only=True)
class LetGo:
    """Give a run to no new request, and unload it when its last one ends."""

    run_id: str


@dataclass(frozen=True, kw_only=True)
class StartJoin:
    """Leave the group, if any, and join this one; then `joined` or `join_failed`. Ends an earlier joining."""

    group: JoinGroup


@dataclass(frozen=True, kw_only=True)
class StartSleep:
    """Put the engine to sleep unless it has work; then `slept`."""

    number: int


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """Report to the hub now: the state, and the fields here.

    `about` is the version of a fault, if that is no longer the machine's target. A fault `of_group`, or of sleep, is
    about no version: a target that is still being fetched is left out of the report.
    """

    run_id: str = ""
    fault: AgentFault | None = None
    about: Target | None = None
    of_group: bool = False
    applied: ApplyReport | None = None


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The agent is to end."""


Action = StartFetch | CancelFetch | StartApply | ResumeEngine | LetGo | StartJoin | StartSleep | SendReport | Leave


class LineMachine:
    """The state of one engine on the line of a run. `version` and `artifact_id` are those served."""

    def __init__(self, run_id: str = "", *, version: int | None = None) -> None:
        self.run_id = run_id
        self.leaving = False  # the hub asked the agent to end
        self.state = AgentState.JOINING if version is None else AgentState.READY
        self.version = version
        self.artifact_id = ""  # of the version served; unknown for one that was there before the agent
        self.target: Target | None = None
        self.held = False  # applied, and paused until Resume
        self._released = False  # a Commit came while it applies that no longer asks it to hold
        self.last_applied: ApplyReport | None = None
        self._poisoned = False
        self._queued: Commit | Prepare | None = None

    # --- from the hub -------------------------------------------------------------------------

    def connected(self) -> list[Action]:
        """A new session began, which will not resume a gang that waited for the old one."""
        actions: list[Action] = [self._report(applied=self.last_applied)]
        return actions + ([ResumeEngine(run_id=self.run_id)] if self.held else [])

    def command(self, command: Prepare | Commit | Abort | Resume) -> list[Action]:
        match command:
            case Prepare():
                return self._prepare(command)
            case Commit():
                return self._commit(command)
            case Abort():
                return self._abort(command)
            case Resume():
                held_here = self.held and self._is_named(command)
                return [ResumeEngine(run_id=self.run_id)] if held_here else []

    def _prepare(self, command: Prepare) -> list[Action]:
        if self.state is AgentState.APPLYING or (self.target is not None and self.target.committed):
            self._queued = self._queued if isinstance(self._queued, Commit) else command
            return []
        if self._is_target(command) or (command.artifact_id == self.artifact_id and self.version is not None):
            return [self._report()]
        return self._fetch(Target(version=command.version, artifact_id=command.artifact_id))

    def _commit(self, command: Commit) -> list[Action]:
        if self.state is AgentState.APPLYING:
            if not self._is_target(command):
                self._queued = command  # and a gang that waits is of no use any more
            elif command.hold:
                return []
            self._released = True
            return [ResumeEngine(run_id=self.run_id)] if self.held else []
        if command.artifact_id == self.artifact_id and self.version is not None:
            return [self._report(applied=self.last_applied)]
        if not self._is_target(command):
            if self._finishes_first(command):
                self._queued = command
                return []
            return self._fetch(
                Target(version=command.version, artifact_id=command.artifact_id, committed=True, hold=command.hold)
            )
        assert self.target is not None
        self.target = replace(self.target, committed=True, hold=command.hold)
        return self._apply() if self.state is AgentState.PREPARED else []

    def _abort(self, command: Abort) -> list[Action]:
        queued = self._queued
        if isinstance(queued, Prepare) and queued.version == command.version:
            self._queued = None
        target = self.target
        if target is None or target.committed or not self._is_named(command) or self.state is AgentState.APPLYING:
            return []
        self._fall_back()
        return [CancelFetch(run_id=self.run_id), self._report()]

    def _is_named(self, command: Abort | Resume) -> bool:
        target = self.target  # hubs of 1.0 name no artifact
        return (
            target is not None and target.version == command.version and command.artifact_id in ("", target.artifact_id)
        )

    # --- from the engine ------------------------------------------------------------------------

    def fetched(self, artifact_id: str) -> list[Action]:
        if self.target is None or self.target.artifact_id != artifact_id or not self._fetching:
            return []
        self._move(AgentState.PREPARED)
        return self._apply() if self.target.committed else [self._report()]

    def fetch_failed(self, artifact_id: str, fault: AgentFault) -> list[Action]:
        if self.target is None or self.target.artifact_id != artifact_id or not self._fetching:
            return []
        refused = self.target
        self._fall_back()
        return [self._report(fault=fault, about=refused), *self._next()]

    def applied(self, artifact_id: str, report: ApplyReport) -> list[Action]:
        assert self.state is AgentState.APPLYING
        assert self.target is not None
        assert self.target.artifact_id == artifact_id
        self.version, self.artifact_id, self._poisoned = report.version, artifact_id, False
        if self.target.hold:
            self.held = True
            return [self._report(), ResumeEngine(run_id=self.run_id)] if self._released else [self._report()]
        return self._finish(report)

    def resumed(self, report: ApplyReport) -> list[Action]:
        return self._finish(report) if self.held else []

    def displaced(self, version: int | None) -> bool:
        """Other weights were loaded by hand; returns whether they replaced a version of the hub."""
        if self.state not in (AgentState.READY, AgentState.FETCHING, AgentState.PREPARED) or self._poisoned:
            return False
        self.version, self.artifact_id, self.last_applied = version, "", None
        return True

    def apply_failed(self, fault: AgentFault) -> list[Action]:
        assert self.state is AgentState.APPLYING
        assert self.target is not None
        torn = self.target
        self._move(AgentState.POISONED)
        self._poisoned, self.held = True, False
        self.version, self.artifact_id, self.target, self.last_applied = None, "", None, None
        if self.leaving:
            return [self._report(fault=fault, about=torn), Leave()]
        return [self._report(fault=fault, about=torn), *self._next()]

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def _fetching(self) -> bool:
        return self.state in (AgentState.FETCHING, AgentState.SEEDING)

    def _report(
        self, *, fault: AgentFault | None = None, about: Target | None = None, applied: ApplyReport | None = None
    ) -> SendReport:
        return SendReport(run_id=self.run_id, fault=fault, about=about, applied=applied)

    def _finishes_first(self, newer: Commit) -> bool:
        target = self.target
        return self._fetching and target is not None and target.committed and newer.version > target.version

    def _is_target(self, command: Prepare | Commit) -> bool:
        return self.target is not None and self.target.artifact_id == command.artifact_id

    def _fetch(self, target: Target) -> list[Action]:
        if self.target is not None:
            self._fall_back()  # superseded: abandon it
        self.target = target
        self._move(AgentState.SEEDING if self.version is None else AgentState.FETCHING)
        return [StartFetch(run_id=self.run_id, version=target.version, artifact_id=target.artifact_id), self._report()]

    def _fall_back(self) -> None:
        self.target = None
        if self._poisoned:
            self._move(AgentState.POISONED)
        else:
            self._move(AgentState.JOINING if self.version is None else AgentState.READY)

    def _apply(self) -> list[Action]:
        assert self.target is not None
        self._released = False
        self._move(AgentState.APPLYING)
        target = self.target
        start = StartApply(run_id=self.run_id, version=target.version, artifact_id=target.artifact_id, hold=target.hold)
        return [self._report(), start]

    def _finish(self, report: ApplyReport) -> list[Action]:
        self._move(AgentState.READY)
        self.held, self.target, self.last_applied = False, None, report
        report_now = self._report(applied=report)
        return [report_now, Leave()] if self.leaving else [report_now, *self._next()]

    def _next(self) -> list[Action]:
        command, self._queued = self._queued, None
        return [] if command is None else self.command(command)

    def _move(self, state: AgentState) -> None:
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise AssertionError(f"an agent cannot go from {self.state.value} to {state.value}")
        self.state = state


class AgentMachine:
    """The state of one engine's agent: its `lines` by run, its group and its sleep.

    A hub without runs knows the line of "", the version that the engine came with, which the first run takes over.
    """

    def __init__(self, *, version: int | None = None) -> None:
        self.lines = {"": LineMachine(version=version)}
        self.group: int | None = None  # generation of the group that the engine is in
        self.sleep_answered: int | None = None  # last Sleep of this session that is over, whatever came of it
        self._last_join: JoinGroup | None = None  # the group that the engine is in or on its way into
        self._leaving = False

    # --- from the hub -------------------------------------------------------------------------

    def connected(self) -> list[Action]:
        self.sleep_answered = None  # another hub may count from the beginning
        return [action for line in self.lines.values() for action in line.connected()]

    def command(self, command: AgentCommand) -> list[Action]:
        match command:
            case Prepare() | Commit() | Abort() | Resume():
                return self._line_for(command.run_id).command(command)
            case Retire():
                run_id = command.run_id  # it is over: what is fetched for it is dropped
                return [CancelFetch(run_id=run_id), LetGo(run_id=run_id)] if run_id in self.lines else []
            case DrainAgent():
                self._leaving = True
                for line in self.lines.values():
                    line.leaving = True
                return [] if any(line.state is AgentState.APPLYING for line in self.lines.values()) else [Leave()]
            case JoinGroup():
                return self._join(command)
            case Sleep():
                has_work = self._leaving or any(line.state is not AgentState.READY for line in self.lines.values())
                return self.slept(command.number) if has_work else [StartSleep(number=command.number)]

    def _line_for(self, run_id: str) -> LineMachine:
        line = self.lines.get(run_id)
        if line is None:
            line = self.lines.pop("", None) or LineMachine()
            line.run_id, line.leaving = run_id, self._leaving
            self.lines[run_id] = line
        return line

    def _join(self, command: JoinGroup) -> list[Action]:
        asked = self._last_join
        if asked is not None and replace(asked, deadline_s=command.deadline_s) == command:
            return [self._report()]  # repeated on a new session, with what is left of the deadline
        self._last_join, self.group = command, None
        return [StartJoin(group=command)]

    # --- from the engine ------------------------------------------------------------------------

    def let_go(self, run_id: str) -> list[Action]:
        self.lines.pop(run_id, None)
        if not self.lines:
            self.lines[""] = LineMachine()
        return [self._report()]

    def joined(self, group: JoinGroup) -> list[Action]:
        if group != self._last_join:
            return []
        self.group = group.generation
        return [self._report()]

    def join_failed(self, group: JoinGroup, fault: AgentFault) -> list[Action]:
        if group != self._last_join:
            return []
        self._last_join = None
        return [self._report(fault)]

    def slept(self, number: int, fault: AgentFault | None = None) -> list[Action]:
        self.sleep_answered = number
        return [self._report(fault)]

    def group_lost(self, generation: int | None) -> list[Action]:
        if generation is None or generation != self.group:
            return []
        self._last_join, self.group = None, None
        return [self._report()]

    def _report(self, fault: AgentFault | None = None) -> SendReport:
        return SendReport(run_id=next(iter(self.lines)), fault=fault, of_group=fault is not None)


def fault_of(error: Exception, defect: Reason = Reason.INTERNAL) -> AgentFault:
    """How an error is reported to the hub; `defect`: one that is neither a MeshError nor a deadline."""
    if isinstance(error, MeshError):
        return AgentFault(reason=error.reason.name, message=error.message)
    reason = Reason.DEADLINE_PASSED if isinstance(error, TimeoutError) else defect
    return AgentFault(reason=reason.name, message=repr(error))
