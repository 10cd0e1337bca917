"""Engines, their agents and the groups they meet in, on top of the simulated hub: only the rules run, no I/O.

A version of the nccl transport arrives only by what the publisher sends into its group: everybody in it takes part, and
takes the bytes for whatever it waits for.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis.stateful import rule

from hub_rules import LAYOUT
from meshrl.inference.agent import states as agent
from meshrl.weights.coordinator.engine_groups import BroadcastRequest
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    AgentFault,
    AgentRegistration,
    AgentReport,
    ApplyReport,
    Transport,
    VersionState,
)
from weight_sync_model import ENGINES, RARELY, TORN, WHICH, Engine, Line, SimulatedHub, expected

GROUP_BROKEN = AgentFault(reason="GROUP_BROKEN", message="")


class SimulatedMesh(SimulatedHub):
    """Engines by name, and the group that the publisher opened last."""

    # --- groups -------------------------------------------------------------------------------------

    @rule()
    def open_group(self) -> None:
        """The publisher opens a group for what comes next."""
        if self.adapters:
            return
        run_id = self.RUNS[0]
        self.groups += 1
        request = BroadcastRequest(
            request_id=f"group-{self.groups}",
            run_id=run_id,
            epoch=self.epoch[run_id],
            store_address="h:1",
            backend="gloo",
            num_senders=1,
            deadline_s=30.0,
        )
        try:
            opened, actions = self.coordinator.open_group(request, self.now_s, self.now_s)
        except MeshError as error:
            expected(error, Reason.GROUP_BROKEN)
            return
        assert opened.generation > max((generation for save in self.history for generation in save.groups), default=0)
        self.take(actions)
        if self.group[2]:
            self.break_group(self.group[0])
        while self.pending:  # the answer comes once the group is durable
            self.perform_one()
        self.group = (opened.generation, self.epoch[run_id], frozenset(member.engine_id for member in opened.members))

    @rule(name=st.sampled_from(ENGINES), comes=st.booleans() | st.just(True))
    def join_ends(self, name: str, comes: bool) -> None:
        engine = self.engines[name]
        group, engine.joining = engine.joining, None
        if group is None:
            return
        if comes and group.generation == self.group[0] and name in self.group[2]:
            self.perform(engine, engine.machine.joined(group))
        else:
            self.perform(engine, engine.machine.join_failed(group, GROUP_BROKEN))

    @rule()
    def send(self) -> None:
        """Broadcasts the newest version: it arrives when everybody came and waits for it."""
        generation, epoch, names = self.group
        run_id = self.RUNS[0]
        newest = self.newest(run_id)
        if newest is None or newest.transport is not Transport.NCCL or not names or epoch != self.epoch[run_id]:
            return
        engines = [self.engines[name] for name in sorted(names)]
        if any(engine.machine.group != generation for engine in engines):
            return  # it still waits for them to come
        if not all(self.waits_for_nccl(engine) for engine in engines):
            self.break_group(generation)
            return
        for engine in engines:
            line, machine = engine.lines[run_id], engine.machine.lines[run_id]
            artifact, line.fetching = line.fetching, None
            assert artifact is not None
            if artifact == newest.artifact_id:
                self.sent += 1
                line.shadow = artifact
                self.perform(engine, machine.fetched(artifact))
            else:
                fault = AgentFault(reason="DIGEST_MISMATCH", message="")
                self.perform(engine, machine.fetch_failed(artifact, fault))

    @rule(stop_after=st.integers(1, 9))
    def group_goes_on(self, stop_after: int) -> None:
        """A group that meets and gets the next version without trouble; stops anywhere between."""
        steps: tuple[Callable[[str], None], ...] = (
            self.connect,
            lambda name: self.open_group() if name == ENGINES[0] else None,
            lambda name: self.command_arrives(name, 9),
            lambda name: self.join_ends(name, True),
            lambda name: self.report_arrives(name, 9),
            lambda name: self.publish(0, 1, True, 0, Transport.NCCL, False) if name == ENGINES[-1] else None,
            lambda _: self.hub_works_off_everything(),
            lambda name: self.command_arrives(name, 9),
            lambda name: self.send() if name == ENGINES[-1] else None,
        )
        for step in steps[:stop_after]:
            for name in ENGINES:
                step(name)

    def waits_for_nccl(self, engine: Engine) -> bool:
        line = engine.lines[self.RUNS[0]]
        through_group = line.fetching is not None and self.manifests[line.fetching].transport is Transport.NCCL
        return through_group and not line.pulls

    def break_group(self, generation: int) -> None:
        self.group = (self.group[0], self.group[1], frozenset())
        for engine in self.engines.values():
            if engine.machine.group == generation:
                self.lose_group(engine)

    def lose_group(self, engine: Engine) -> None:
        """The engine's group is gone, and with it what was on its way in it."""
        lost = engine.machine.group_lost(engine.machine.group)
        if self.waits_for_nccl(engine):
            line = engine.lines[self.RUNS[0]]
            artifact, line.fetching = line.fetching, None
            assert artifact is not None
            self.perform(engine, engine.machine.lines[self.RUNS[0]].fetch_failed(artifact, GROUP_BROKEN))
        self.perform(engine, lost)

    # --- engines ------------------------------------------------------------------------------------

    def perform(self, engine: Engine, actions: list[agent.Action]) -> None:
        for action in actions:
            match action:
                case agent.SendReport():
                    if engine.lease:
                        engine.up.append(self.report_of(engine, action))
                case agent.StartFetch():
                    line = engine.lines[action.run_id]
                    line.fetching, line.shadow = action.artifact_id, None
                    line.pulls = self.is_copied(action.artifact_id)
                case agent.CancelFetch():
                    line = engine.lines[action.run_id]
                    line.fetching, line.shadow = None, None
                case agent.StartApply():
                    # The heart of it: only what was verified, and what is decided on disk, is ever applied.
                    line = engine.lines[action.run_id]
                    assert line.shadow == action.artifact_id
                    assert self.manifests[action.artifact_id].run_id == action.run_id
                    assert action.artifact_id in self.decided_artifacts()
                    assert line.applying is None
                    line.applying, line.paused = action, True
                case agent.ResumeEngine():
                    assert engine.machine.lines[action.run_id].held
                    engine.lines[action.run_id].resuming = True
                case agent.StartJoin():
                    engine.joining = action.group
                    self.lose_group(engine)  # it takes the place of the one before

    def report_of(self, engine: Engine, tell: agent.SendReport) -> AgentReport:
        machine = engine.machine.lines[tell.run_id]
        target = tell.about or machine.target
        return AgentReport(
            lease_id=engine.lease,
            run_id=tell.run_id,
            state=machine.state,
            serving_version=machine.version,
            target_version=None if target is None else target.version,
            fault=tell.fault,
            applied=tell.applied,
            group_generation=engine.machine.group,
            target_artifact_id="" if target is None or tell.fault is not None else target.artifact_id,
        )

    def decided_artifacts(self) -> set[str]:
        return {row["artifact_id"] for row in self.rows_in(VersionState.COMMITTING)}

    @rule(name=st.sampled_from(ENGINES))
    def connect(self, name: str) -> None:
        engine = self.engines[name]
        if engine.lease:
            return
        self.leases += 1
        held, root = None, b""
        if not self.adapters and (machine := engine.machine.lines.get(self.RUNS[0])) is not None:
            held = machine.version
            root = self.manifests[engine.lines[self.RUNS[0]].live].result_root if held is not None else b""
        registration = AgentRegistration(
            engine_id=name,
            url="http://e",
            transports=(Transport.STREAM, Transport.NCCL),
            collective_ranks=1,
            collective_backend="gloo",
            layout_signature=LAYOUT,
            held_version=held,
            held_root=root,
        )
        lease, actions = self.coordinator.register(registration, f"lease-{self.leases}", self.now_s)
        self.take(actions)
        engine.lease = lease.lease_id
        self.perform(engine, engine.machine.connected())
        first = engine.up.popleft()
        self.take(self.coordinator.report(first, self.now_s))
        self.take(self.coordinator.connect(engine.lease, self.now_s))

    @rule(name=st.sampled_from(ENGINES), really=RARELY)
    def session_breaks(self, name: str, really: bool) -> None:
        engine = self.engines[name]
        if engine.lease and really:
            self.coordinator.disconnect(engine.lease)
            self.hang_up(engine)

    @rule(name=st.sampled_from(ENGINES), really=RARELY)
    def engine_is_killed(self, name: str, really: bool) -> None:
        if not really:
            return
        self.session_breaks(name, True)
        self.break_group(self.engines[name].machine.group or -1)
        self.engines[name] = Engine()

    @rule(name=st.sampled_from(ENGINES), count=st.integers(1, 3))
    def command_arrives(self, name: str, count: int) -> None:
        engine = self.engines[name]
        for _ in range(min(count, len(engine.down))):
            self.perform(engine, engine.machine.command(engine.down.popleft()))

    @rule(name=st.sampled_from(ENGINES), count=st.integers(1, 3))
    def report_arrives(self, name: str, count: int) -> None:
        engine = self.engines[name]
        for _ in range(min(count, len(engine.up))):
            if engine.up[0].lease_id != engine.lease:
                engine.up.popleft()
                continue
            try:
                self.take(self.coordinator.report(engine.up.popleft(), self.now_s))
            except MeshError as error:
                expected(error, Reason.LEASE_EXPIRED)
                self.hang_up(engine)
                return

    @rule(name=st.sampled_from(ENGINES), which=WHICH, sound=st.booleans() | st.just(True))
    def fetch_ends(self, name: str, which: int, sound: bool) -> None:
        engine, run_id = self.engines[name], self.run(which)
        if self.waits_for_nccl(engine):
            if engine.machine.group is None:
                self.lose_group(engine)
            elif not sound:
                self.break_group(engine.machine.group)
            return  # it comes by `send`
        line = engine.lines[run_id]
        artifact, line.fetching = line.fetching, None
        if artifact is None:
            return
        machine = engine.machine.lines[run_id]
        if sound:
            line.shadow = artifact
            self.perform(engine, machine.fetched(artifact))
        else:
            fault = AgentFault(reason="DIGEST_MISMATCH", message="")
            self.perform(engine, machine.fetch_failed(artifact, fault))

    @rule(name=st.sampled_from(ENGINES), which=WHICH, whole=st.booleans() | st.just(True))
    def apply_ends(self, name: str, which: int, whole: bool) -> None:
        engine, run_id = self.engines[name], self.run(which)
        line = engine.lines[run_id]
        job, line.applying = line.applying, None
        if job is None:
            return
        line.shadow, machine = None, engine.machine.lines[run_id]
        if not whole:
            line.live = TORN
            self.perform(engine, machine.apply_failed(AgentFault(reason="ENGINE_FAILED", message="")))
            return
        line.live = job.artifact_id
        line.paused = job.hold
        self.perform(engine, machine.applied(job.artifact_id, self.applied(line)))

    def applied(self, line: Line) -> ApplyReport:
        manifest = self.manifests[line.live]
        return ApplyReport(
            version=manifest.version, root=manifest.result_root, pause_s=0.1, prepare_s=0.1, requests_kept=0
        )

    @rule(name=st.sampled_from(ENGINES), which=WHICH)
    def resume_ends(self, name: str, which: int) -> None:
        engine, run_id = self.engines[name], self.run(which)
        line, machine = engine.lines[run_id], engine.machine.lines.get(run_id)
        if line.resuming and machine is not None and machine.held:
            line.paused = False
            self.perform(engine, machine.resumed(self.applied(line)))
        line.resuming = False

    @rule(
        names=st.sampled_from([("a",), ("b",), ("a", "b")]), which=WHICH, stop_after=st.integers(1, 8),
        whole=st.booleans(),
    )  # fmt: skip
    def engines_go_on(self, names: tuple[str, ...], which: int, stop_after: int, whole: bool) -> None:
        """The next steps of engines without trouble but, perhaps, in the last one; stops anywhere between."""
        steps: tuple[Callable[[str], None], ...] = (
            self.connect,
            lambda _: self.hub_works_off_everything(),
            lambda name: self.command_arrives(name, 3),
            lambda name: self.fetch_ends(name, which, True),
            lambda name: self.report_arrives(name, 3),
            lambda _: self.hub_works_off_everything(),
            lambda name: self.command_arrives(name, 3),
            lambda name: self.apply_ends(name, which, whole),
        )
        for step in steps[:stop_after]:
            for name in names:
                step(name)

    @rule(seconds=st.sampled_from([0.1, 0.1, 1.0, 1.0, 6.0, 25.0]), beat=st.booleans() | st.just(True))
    def time_passes(self, seconds: float, beat: bool) -> None:
        self.now_s += seconds
        if beat:
            for engine in self.engines.values():
                record = self.coordinator.pool.by_lease(engine.lease)
                for run_id in engine.machine.lines if record is not None else ():
                    tell = agent.SendReport(run_id=run_id)
                    self.take(self.coordinator.report(self.report_of(engine, tell), self.now_s))
        self.take(self.coordinator.tick(self.now_s))
