"""Hub and agents under every order of events: crashes, lost messages, faults, restarts. Only their rules run, no I/O.

The simulated disk holds what was made durable; a hub that crashes keeps that and nothing else. Engines hold the name of
the artifact that is live, or TORN while an apply that failed has left them half way.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshrl.inference import agent_states as agent
from meshrl.weights import states as hub
from meshrl.weights.coordinator import Coordinator
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id, build_manifest, digest
from meshrl.wire.types import (
    Activation,
    ActivationPolicy,
    AgentFault,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    ChunkEntry,
    Manifest,
    TensorEntry,
    Transport,
    VersionState,
)

TORN = "torn"
LEASE_S = 10.0
ENGINES = ("a", "b")
RARELY = st.sampled_from([False, False, False, False, True])  # else no run gets anywhere


def manifest_of(epoch: int, version: int, content: int) -> Manifest:
    data = bytes((content,)) * 4
    tensor = TensorEntry(name="w", dtype="float32", shape=(1,), offset=0, num_bytes=4, digest=digest(data))
    chunk = ChunkEntry(offset=0, length=4, digest=digest(data))
    return build_manifest(
        run_id="run", epoch=epoch, version=version, transport=Transport.STREAM, tensors=(tensor,), chunks=(chunk,)
    )


def expected(error: MeshError, *reasons: Reason) -> None:
    if error.reason not in reasons:
        raise error


@dataclass
class Engine:
    """One simulated process: an agent's rules and an engine."""

    machine: agent.AgentMachine = field(default_factory=agent.AgentMachine)
    lease: str = ""
    live: str = "base"
    paused: bool = False
    fetching: str | None = None
    shadow: str | None = None
    applying: agent.StartApply | None = None
    resuming: bool = False
    down: deque[Any] = field(default_factory=deque)  # commands on their way
    up: deque[AgentReport] = field(default_factory=deque)  # reports on their way


class WeightSync(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.disk: list[dict[str, Any]] = []
        self.pending: deque[hub.Action] = deque()
        self.engines = {name: Engine() for name in ENGINES}
        self.manifests: dict[str, Manifest] = {}
        self.next_version = 0
        self.epoch = 1
        self.leases = 0
        self.answers: dict[hub.Key, Activation] = {}
        self.coordinator = self.new_hub()

    def new_hub(self) -> Coordinator:
        return Coordinator(
            lease_s=LEASE_S, max_chunk_bytes=2**20, keep_versions=2, min_engines=1, commit_deadline_s=20.0
        )

    # --- the hub's shell: actions in order, decisions take effect once durable --------------------

    def take(self, actions: list[hub.Action]) -> None:
        self.pending.extend(actions)

    def perform_one(self) -> None:
        action = self.pending.popleft()
        if isinstance(action, hub.Append):
            self.disk.append(dict(action.entry))
            if action.decision is not None:
                self.take(self.coordinator.decided(action.decision, self.now_s))
        elif isinstance(action, hub.Send):
            for engine in self.engines.values():
                if engine.lease == action.lease_id:
                    engine.down.append(action.command)
        elif isinstance(action, hub.Answer) and isinstance(action.result, Activation):
            assert self.answers.setdefault(action.key, action.result) == action.result
        elif isinstance(action, hub.EndSession):
            for engine in self.engines.values():
                if engine.lease == action.lease_id:
                    self.hang_up(engine)

    def hang_up(self, engine: Engine) -> None:
        engine.lease = ""
        engine.down.clear()
        engine.up.clear()

    @rule(count=st.integers(1, 12))
    def hub_works(self, count: int) -> None:
        for _ in range(min(count, len(self.pending))):
            self.perform_one()

    @rule()
    def hub_works_off_everything(self) -> None:
        while self.pending:
            self.perform_one()

    @rule(really=RARELY)
    def hub_crashes_and_restarts(self, really: bool) -> None:
        if not really:
            return
        self.pending.clear()  # whatever was not durable is gone
        for engine in self.engines.values():
            self.hang_up(engine)
        self.coordinator = self.new_hub()
        self.coordinator.recover(self.disk, self.now_s, self.now_s)

    # --- publisher and orchestrator ---------------------------------------------------------------

    @rule(content=st.integers(0, 3), seal=st.booleans(), skip=st.integers(0, 1))
    def publish(self, content: int, seal: bool, skip: int) -> None:
        manifest = manifest_of(self.epoch, self.next_version + skip, content)
        artifact = artifact_id(manifest)
        self.manifests[artifact] = manifest
        try:
            record, actions = self.coordinator.stage(manifest, artifact, self.now_s)
        except MeshError as error:
            # A version that was lost with its hub may meanwhile be older than a decision, or differ in content.
            expected(error, Reason.VERSION_SUPERSEDED, Reason.VERSION_CONFLICT)
            self.next_version += 1
            return
        self.take(actions)
        if seal and record.state is VersionState.STAGING:
            self.take(self.coordinator.seal(record.key, "", self.now_s, self.now_s))
            self.next_version = manifest.version + 1

    @rule(back=st.integers(0, 2), really=RARELY)
    def trainer_restarts(self, back: int, really: bool) -> None:
        if not really:
            return
        self.epoch += 1
        self.next_version = max(0, self.next_version - back)

    @precondition(lambda self: self.coordinator.epoch > 1)
    @rule(version=st.integers(0, 20))
    def stale_trainer_is_refused(self, version: int) -> None:
        manifest = manifest_of(self.coordinator.epoch - 1, version, 9)
        with pytest.raises(MeshError) as caught:
            self.coordinator.stage(manifest, artifact_id(manifest), self.now_s)
        assert caught.value.reason is Reason.STALE_EPOCH

    @rule(back=st.integers(0, 3), gang=st.booleans(), min_ready=st.integers(0, 2))
    def activate(self, back: int, gang: bool, min_ready: int) -> None:
        policy = ActivationPolicy.GANG if gang else ActivationPolicy.ROLLING
        try:
            record, actions = self.coordinator.activate(
                run_id="run",
                version=max(0, self.next_version - 1 - back),
                policy=policy,
                min_ready=min_ready,
                wait_s=30.0,
                now_s=self.now_s,
            )
        except MeshError as error:
            expected(
                error,
                Reason.UNKNOWN_RUN,
                Reason.UNKNOWN_VERSION,
                Reason.VERSION_NOT_SEALED,
                Reason.VERSION_SUPERSEDED,
            )
            return
        if record.key in self.answers:
            assert actions == [hub.Answer(key=record.key, result=self.answers[record.key])]
        self.take(actions)

    @rule(content=st.integers(0, 3), gang=st.booleans(), min_ready=st.integers(0, 2))
    def publish_and_activate(self, content: int, gang: bool, min_ready: int) -> None:
        self.publish(content, True, 0)
        self.activate(0, gang, min_ready)

    @rule(back=st.integers(0, 2), really=RARELY)
    def abort(self, back: int, really: bool) -> None:
        if not really:
            return
        version = max(0, self.next_version - 1 - back)
        record = self.coordinator.records.get((self.coordinator.epoch, version))
        try:
            self.take(
                self.coordinator.abort(
                    run_id="run", epoch=self.coordinator.epoch, version=version, message="", now_s=self.now_s
                )
            )
        except MeshError as error:
            if error.reason is Reason.VERSION_DECIDED:
                assert record is not None
                assert record.deciding or record.state not in hub.UNDECIDED
            else:
                expected(error, Reason.UNKNOWN_RUN, Reason.UNKNOWN_VERSION)

    # --- engines ------------------------------------------------------------------------------------

    def perform(self, engine: Engine, actions: list[agent.Action]) -> None:
        machine = engine.machine
        for action in actions:
            match action:
                case agent.Tell():
                    if engine.lease:
                        engine.up.append(self.report_of(engine, action))
                case agent.StartFetch():
                    engine.fetching, engine.shadow = action.artifact_id, None
                case agent.CancelFetch():
                    engine.fetching, engine.shadow = None, None
                case agent.StartApply():
                    # The heart of it: only what was verified, and what is decided on disk, is ever applied.
                    assert engine.shadow == action.artifact_id
                    assert action.artifact_id in self.decided_artifacts()
                    assert engine.applying is None
                    engine.applying, engine.paused = action, True
                case agent.ResumeEngine():
                    assert machine.held
                    engine.resuming = True

    def report_of(self, engine: Engine, tell: agent.Tell) -> AgentReport:
        machine = engine.machine
        target = machine.target.version if machine.target is not None else None
        return AgentReport(
            lease_id=engine.lease,
            state=machine.state,
            serving_version=machine.version,
            target_version=tell.target_version if tell.target_version is not None else target,
            fault=tell.fault,
            applied=tell.applied,
        )

    def decided_artifacts(self) -> set[str]:
        staged = {(e["epoch"], e["version"]): e["artifact_id"] for e in self.disk if e["kind"] == "staged"}
        return {staged[(e["epoch"], e["version"])] for e in self.disk if e["kind"] == "decided"}

    @rule(name=st.sampled_from(ENGINES))
    def connect(self, name: str) -> None:
        engine = self.engines[name]
        if engine.lease:
            return
        self.leases += 1
        held = engine.machine.version
        root = self.manifests[engine.live].result_root if held is not None else b""
        registration = AgentRegistration(
            engine_id=name,
            url="http://e",
            transports=(Transport.STREAM,),
            layout_signature=b"l",
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

    @rule(name=st.sampled_from(ENGINES), sound=st.booleans() | st.just(True))
    def fetch_ends(self, name: str, sound: bool) -> None:
        engine = self.engines[name]
        artifact, engine.fetching = engine.fetching, None
        if artifact is None:
            return
        if sound:
            engine.shadow = artifact
            self.perform(engine, engine.machine.fetched(artifact))
        else:
            fault = AgentFault(reason="DIGEST_MISMATCH", message="")
            self.perform(engine, engine.machine.fetch_failed(artifact, fault))

    @rule(name=st.sampled_from(ENGINES), whole=st.booleans() | st.just(True))
    def apply_ends(self, name: str, whole: bool) -> None:
        engine = self.engines[name]
        job, engine.applying = engine.applying, None
        if job is None:
            return
        engine.shadow = None
        if not whole:
            engine.live = TORN
            self.perform(engine, engine.machine.apply_failed(AgentFault(reason="ENGINE_FAILED", message="")))
            return
        engine.live = job.artifact_id
        engine.paused = job.hold
        self.perform(engine, engine.machine.applied(job.artifact_id, self.applied(engine)))

    def applied(self, engine: Engine) -> ApplyReport:
        manifest = self.manifests[engine.live]
        return ApplyReport(
            version=manifest.version, root=manifest.result_root, pause_s=0.1, prepare_s=0.1, requests_kept=0
        )

    @rule(name=st.sampled_from(ENGINES))
    def resume_ends(self, name: str) -> None:
        engine = self.engines[name]
        if engine.resuming and engine.machine.held:
            engine.paused = False
            self.perform(engine, engine.machine.resumed(self.applied(engine)))
        engine.resuming = False

    @rule(names=st.sampled_from([("a",), ("b",), ("a", "b")]), stop_after=st.integers(1, 8), whole=st.booleans())
    def engines_go_on(self, names: tuple[str, ...], stop_after: int, whole: bool) -> None:
        """The next steps of engines without trouble but, perhaps, in the last one; stops anywhere between."""
        steps: tuple[Callable[[str], None], ...] = (
            self.connect,
            lambda _: self.hub_works_off_everything(),
            lambda name: self.command_arrives(name, 3),
            lambda name: self.fetch_ends(name, True),
            lambda name: self.report_arrives(name, 3),
            lambda _: self.hub_works_off_everything(),
            lambda name: self.command_arrives(name, 3),
            lambda name: self.apply_ends(name, whole),
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
                if record is not None:
                    self.take(self.coordinator.report(self.report_of(engine, agent.Tell()), self.now_s))
        self.take(self.coordinator.tick(self.now_s))

    # --- what must always hold ------------------------------------------------------------------------

    @invariant()
    def engines_serve_only_whole_decided_versions(self) -> None:
        decided = self.decided_artifacts()
        for engine in self.engines.values():
            machine = engine.machine
            if engine.live == TORN:
                assert engine.paused
                assert machine.version is None
                assert machine.state not in (AgentState.READY, AgentState.FETCHING)
            elif machine.version is not None:
                assert engine.live in decided
                assert machine.version == self.manifests[engine.live].version

    @invariant()
    def hub_routes_only_to_engines_with_a_decided_version(self) -> None:
        decided = [self.manifests[artifact] for artifact in self.decided_artifacts()]
        vouched = {(manifest.version, manifest.result_root) for manifest in decided}
        for info in self.coordinator.pool.infos("", self.coordinator.records.values(), self.now_s):
            if info.routable:
                record = self.coordinator.pool.engines[info.engine_id]
                assert (record.serving, record.root) in vouched

    @invariant()
    def decisions_only_go_forward(self) -> None:
        decided = [(entry["epoch"], entry["version"]) for entry in self.disk if entry["kind"] == "decided"]
        assert decided == sorted(set(decided))

    @invariant()
    def log_gives_back_the_same_versions(self) -> None:
        if self.pending:
            return
        replayed = self.new_hub()
        replayed.recover(self.disk, self.now_s, self.now_s)
        assert replayed.epoch == self.coordinator.epoch
        assert replayed.revision == self.coordinator.revision
        mine = {key: (r.state, r.artifact_id, r.answer) for key, r in self.coordinator.records.items()}
        assert {key: (r.state, r.artifact_id, r.answer) for key, r in replayed.records.items()} == mine

    @invariant()
    def at_most_the_kept_versions_stay_committed(self) -> None:
        states = [record.state for record in self.coordinator.records.values()]
        assert states.count(VersionState.COMMITTED) <= 2

    # --- and what must come in the end ------------------------------------------------------------------

    def teardown(self) -> None:
        """With no more trouble, every engine comes to serve the newest decided version and none stays paused."""
        for _ in range(80):
            self.now_s += 1.0
            for name in ENGINES:
                self.connect(name)
                self.command_arrives(name, 9)
                self.fetch_ends(name, True)
                self.apply_ends(name, True)
                self.resume_ends(name)
                self.report_arrives(name, 9)
            self.time_passes(0.1, True)
            while self.pending:
                self.perform_one()
        newest = self.coordinator.newest_decided()
        if newest is None:
            return
        assert newest.state is VersionState.COMMITTED
        for engine in self.engines.values():
            assert not engine.paused
            assert engine.machine.state in (AgentState.READY, AgentState.PREPARED)
            assert engine.machine.version == newest.version
            assert self.manifests[engine.live].result_root == newest.root
        infos = self.coordinator.pool.infos("", self.coordinator.records.values(), self.now_s)
        assert [info.routable for info in infos] == [True, True]


WeightSync.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_weight_sync = WeightSync.TestCase


def walk(seed: int, steps: int) -> WeightSync:
    """A long run with the trouble rare enough that versions get through; checks everything after every step."""
    draw = random.Random(seed)
    mesh = WeightSync()
    trouble = draw.choice([0.0, 0.02, 0.05, 0.15])

    def flip() -> bool:
        return draw.random() < 0.5

    usual: list[tuple[float, Callable[[str], None]]] = [
        (1.0, lambda _: mesh.publish(draw.randrange(4), draw.random() < 0.8, 0)),
        (1.0, lambda _: mesh.activate(draw.choice([0, 0, 0, 1, 2]), flip(), draw.choice([0, 0, 0, 1, 2]))),
        (4.0, lambda _: mesh.hub_works(draw.randrange(1, 12))),
        (3.0, lambda name: mesh.connect(name)),
        (4.0, lambda name: mesh.command_arrives(name, draw.randrange(1, 4))),
        (4.0, lambda name: mesh.report_arrives(name, draw.randrange(1, 4))),
        (3.0, lambda name: mesh.fetch_ends(name, draw.random() > 2 * trouble)),
        (3.0, lambda name: mesh.apply_ends(name, draw.random() > 3 * trouble)),
        (3.0, lambda name: mesh.resume_ends(name)),
        (1.0, lambda _: mesh.time_passes(draw.choice([0.1, 0.5, 2.0]), draw.random() > trouble)),
    ]
    rare: list[Callable[[str], None]] = [
        lambda _: mesh.hub_crashes_and_restarts(True),
        lambda _: mesh.trainer_restarts(draw.randrange(3), True),
        lambda _: mesh.abort(draw.randrange(3), True),
        lambda name: mesh.session_breaks(name, True),
        lambda name: mesh.engine_is_killed(name, True),
        lambda _: mesh.time_passes(25.0, flip()),
    ]
    weights = [weight for weight, _ in usual]
    for _ in range(steps):
        name = draw.choice(ENGINES)
        if draw.random() < trouble:
            draw.choice(rare)(name)
        else:
            draw.choices(usual, weights)[0][1](name)
        mesh.engines_serve_only_whole_decided_versions()
        mesh.hub_routes_only_to_engines_with_a_decided_version()
        mesh.decisions_only_go_forward()
        mesh.log_gives_back_the_same_versions()
        mesh.at_most_the_kept_versions_stay_committed()
    mesh.teardown()
    return mesh


def test_long_runs_keep_the_law_and_get_versions_through() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(60):
        kinds.update(entry["kind"] for entry in walk(seed, 300).disk)
    # The walk would prove nothing if little happened in it.
    assert kinds["committed"] > 100
    assert kinds["retired"] > 50
    assert kinds["aborted"] > 100
    assert kinds["epoch"] > 60
