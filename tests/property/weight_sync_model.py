"""The hub and a publisher as a state machine: only the rules run, no I/O; every step may go wrong.

The simulated disk holds what was made durable; a hub that crashes keeps that and nothing else, and after a power cut
only what was saved up to the last row that outlives one. Engines hold the name of the artifact that is live, or TORN
while an apply that failed has left them half way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from hub_rules import LAYOUT, copy_of, saved_over
from meshrl.inference.agent import states as agent
from meshrl.weights.coordinator import states as hub
from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.line import LineLimits, RunLine
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import Adapter, artifact_id, build_manifest, digest
from meshrl.wire.types import (
    Activation,
    ActivationPolicy,
    ActivationRequest,
    AdapterConfig,
    AgentReport,
    ChunkEntry,
    CollectivePlan,
    Commit,
    JoinGroup,
    Manifest,
    Prepare,
    TensorEntry,
    Transport,
    VersionState,
)
from meshrl.wire.values import JsonObject

TORN = "torn"
LEASE_S = 10.0
KEPT_ENDED = 2  # small, so that every run forgets versions
ENGINES = ("a", "b")
WHICH = st.integers(0, 1)  # of the runs
TRANSPORTS = st.sampled_from([Transport.STREAM, Transport.NCCL])
RARELY = st.sampled_from([False, False, False, False, True])  # else no run gets anywhere


def manifest_of(
    run_id: str, epoch: int, version: int, content: int, transport: Transport = Transport.STREAM, *, adapter: bool
) -> Manifest:
    whole = digest(bytes((content,)) * 4)
    collective = transport is Transport.NCCL
    tensor_digest = whole[:16] if collective else whole
    tensor = TensorEntry(name="w", dtype="float32", shape=(1,), offset=0, num_bytes=4, digest=tensor_digest)
    config = AdapterConfig(rank=1, lora_alpha=1.0, target_modules=("w",))
    return build_manifest(
        run_id=run_id,
        epoch=epoch,
        version=version,
        transport=transport,
        tensors=(tensor,),
        chunks=() if collective else (ChunkEntry(offset=0, length=4, digest=whole),),
        collective=CollectivePlan(num_senders=1, bucket_bytes=64) if collective else None,
        adapter=Adapter(config=config, base_layout=LAYOUT) if adapter else None,
    )


def expected(error: MeshError, *reasons: Reason) -> None:
    if error.reason not in reasons:
        raise error


@dataclass
class Line:
    """What one run has in a simulated engine."""

    live: str = "base"
    paused: bool = False
    fetching: str | None = None
    pulls: bool = False  # from the hub, rather than through the group
    shadow: str | None = None
    applying: agent.StartApply | None = None
    resuming: bool = False


@dataclass
class Engine:
    """One simulated process: an agent's rules and an engine."""

    machine: agent.AgentMachine = field(default_factory=agent.AgentMachine)
    lease: str = ""
    lines: dict[str, Line] = field(default_factory=lambda: defaultdict(Line))
    joining: JoinGroup | None = None
    down: deque[Any] = field(default_factory=deque)  # commands on their way
    up: deque[AgentReport] = field(default_factory=deque)  # reports on their way


class SimulatedHub(RuleBasedStateMachine):
    """The hub and the publisher of each run; what engines do comes on top.

    Several runs are adapters for one base model, each with its own line. One run trains the base model, through groups
    as well.
    """

    RUNS: tuple[str, ...] = ("run",)

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.disk: hub.Save | None = None
        self.synced: hub.Save | None = None  # of it, what outlives a power cut
        self.history: list[hub.Save] = []  # all that was ever saved
        self.pending: deque[hub.Action] = deque()
        self.engines = {name: Engine() for name in ENGINES}
        self.manifests: dict[str, Manifest] = {}
        self.next_version = dict.fromkeys(self.RUNS, 0)
        self.epoch = dict.fromkeys(self.RUNS, 1)
        self.leases = 0
        self.groups = 0  # asked for
        self.group: tuple[int, int, frozenset[str]] = (0, 0, frozenset())  # generation, epoch, who should come
        self.sent = 0  # broadcasts that everybody in the group got
        self.answers: dict[hub.Key, Activation] = {}
        self.coordinator = self.new_hub()

    def new_hub(self) -> Coordinator:
        limits = LineLimits(keep_versions=2, min_engines=1, commit_deadline_s=20.0, kept_ended=KEPT_ENDED)
        return Coordinator(limits, lease_s=LEASE_S, max_chunk_bytes=2**20)

    @property
    def adapters(self) -> bool:
        return len(self.RUNS) > 1

    def run(self, which: int) -> str:
        return self.RUNS[which % len(self.RUNS)]

    def line(self, run_id: str) -> RunLine | None:
        return self.coordinator.lines.get(run_id)

    def hub_epoch(self, run_id: str) -> int:
        return self.coordinator.epochs.get(run_id, 0)

    def rows_in(self, state: VersionState) -> list[JsonObject]:
        """The rows of versions in a state that were ever saved."""
        rows = (row for save in self.history for row in save.versions.values() if row is not None)
        return [row for row in rows if row["state"] == state.value]

    # --- the hub's shell: actions in order, decisions take effect once durable --------------------

    def take(self, actions: list[hub.Action]) -> None:
        for action in actions:
            if isinstance(action, hub.Send) and isinstance(action.command, Prepare | Commit):
                self.check_told(action.engine_id, action.command)
        self.pending.extend(actions)

    def check_told(self, engine_id: str, command: Prepare | Commit) -> None:
        """Nobody waits for a version that is neither sent in the group that it is in nor here as a copy."""
        manifest = self.manifests[command.artifact_id]
        engine = self.coordinator.pool.engines[engine_id]
        if manifest.transport is not Transport.NCCL or self.is_copied(command.artifact_id):
            return
        if isinstance(command, Commit) and engine.on(command.run_id).prepared == command.artifact_id:
            return
        group = self.coordinator.groups.current
        assert group is not None
        assert engine.group_generation == group.generation
        assert group.request.epoch == manifest.epoch

    def perform_one(self) -> None:
        action = self.pending.popleft()
        if isinstance(action, hub.Save):
            self.disk = saved_over(self.disk, action)
            self.history.append(action)
            if action.outlives_power_cut:
                self.synced = self.disk
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

    @rule(really=RARELY, power_cut=st.booleans())
    def hub_crashes_and_restarts(self, really: bool, power_cut: bool) -> None:
        if not really:
            return
        self.pending.clear()  # whatever was not durable is gone
        if power_cut:
            self.lose_what_need_not_outlive_a_power_cut()
        for engine in self.engines.values():
            self.hang_up(engine)
        self.coordinator = self.new_hub()
        self.coordinator.recover(self.disk, self.now_s, self.now_s)
        for run_id in self.RUNS:
            known = self.hub_epoch(run_id)
            if known and self.epoch[run_id] > known + 1:
                # The epoch before was not durable. The trainer is refused and ends; its next start asks this hub.
                self.epoch[run_id] = known + 1

    def lose_what_need_not_outlive_a_power_cut(self) -> None:
        """Neither decisions nor epochs."""
        self.disk, saved = self.synced, self.history
        if saved:
            assert self.disk is not None
            assert self.disk.run["epochs"] == saved[-1].run["epochs"]
            rows = {save.decision: self.disk.versions.get(save.decision) for save in saved if save.decision is not None}
            decided = {state.value for state in (*hub.DECIDED, VersionState.RETIRED)}
            assert all(row is None or row["state"] in decided for row in rows.values())
            self.answers = {
                key: answer
                for key, answer in self.answers.items()
                if (row := self.disk.versions.get(key)) is not None and row["answer"] is not None
            }

    # --- publisher and orchestrator ---------------------------------------------------------------

    @rule(
        which=WHICH, content=st.integers(0, 3), seal=st.booleans(), skip=st.integers(0, 1), transport=TRANSPORTS,
        arrives=st.booleans(),
    )  # fmt: skip
    def publish(self, which: int, content: int, seal: bool, skip: int, transport: Transport, arrives: bool) -> None:
        run_id = self.run(which)
        transport = Transport.STREAM if self.adapters else transport
        version = self.next_version[run_id] + skip
        manifest = manifest_of(run_id, self.epoch[run_id], version, content, transport, adapter=self.adapters)
        artifact = artifact_id(manifest)
        self.manifests[artifact] = manifest
        try:
            record, actions = self.coordinator.stage(manifest, artifact)
        except MeshError as error:
            # A version that was lost with its hub may meanwhile be older than a decision, or differ in content.
            expected(error, Reason.VERSION_SUPERSEDED, Reason.VERSION_CONFLICT)
            self.next_version[run_id] += 1
            return
        self.take(actions)
        if arrives and transport is Transport.STREAM:
            self.take(self.coordinator.arrives(record, self.now_s))
        if seal and record.state is VersionState.STAGING:
            self.take(self.coordinator.seal(record.key, "", self.now_s, self.now_s))
            self.next_version[run_id] = manifest.version + 1

    def is_copied(self, artifact: str) -> bool:
        return any(record.copied for record in self.coordinator.live if record.artifact_id == artifact)

    @rule(seal=st.booleans())
    def copy(self, seal: bool) -> None:
        """The publisher brings the hub a copy of the newest version that it has broadcast."""
        if self.adapters:
            return
        run_id = self.RUNS[0]
        newest = self.newest(run_id)
        if newest is None or newest.transport is not Transport.NCCL or newest.state not in hub.LIVE:
            return
        manifest = copy_of(self.manifests[newest.artifact_id])
        record, actions = self.coordinator.stage(manifest, artifact_id(manifest))
        assert record is newest
        self.take(actions)
        if seal and record.takes(artifact_id(manifest)):
            self.take(self.coordinator.copied(record, self.now_s))

    def newest(self, run_id: str) -> hub.VersionRecord | None:
        """The newest version that the publisher of a run has sealed."""
        states, line = hub.DECIDED | {VersionState.SEALED}, self.line(run_id)
        records = [] if line is None else line.records.values()
        mine = [r for r in records if r.key.epoch == self.epoch[run_id] and r.state in states]
        return max(mine, key=lambda record: record.key, default=None)

    @rule(which=WHICH, back=st.integers(0, 2), really=RARELY)
    def trainer_restarts(self, which: int, back: int, really: bool) -> None:
        if not really:
            return
        run_id = self.run(which)
        self.epoch[run_id] = self.hub_epoch(run_id) + 1  # the one before may never have published
        self.next_version[run_id] = max(0, self.next_version[run_id] - back)
        self.break_group(self.group[0])

    def break_group(self, generation: int) -> None:
        """Everybody who is in a group loses it."""
        raise NotImplementedError

    @precondition(lambda self: self.hub_epoch(self.RUNS[0]) > 1)
    @rule(version=st.integers(0, 20))
    def stale_trainer_is_refused(self, version: int) -> None:
        run_id = self.RUNS[0]
        manifest = manifest_of(run_id, self.hub_epoch(run_id) - 1, version, 9, adapter=self.adapters)
        with pytest.raises(MeshError) as caught:
            self.coordinator.stage(manifest, artifact_id(manifest))
        assert caught.value.reason is Reason.STALE_EPOCH

    @precondition(lambda self: self.hub_epoch(self.RUNS[0]) > 0)
    @rule(version=st.integers(0, 20), beyond=st.integers(2, 2**40))
    def epoch_beyond_the_next_is_refused(self, version: int, beyond: int) -> None:
        run_id = self.RUNS[0]
        manifest = manifest_of(run_id, self.hub_epoch(run_id) + beyond, version, 9, adapter=self.adapters)
        with pytest.raises(MeshError) as caught:
            self.coordinator.stage(manifest, artifact_id(manifest))
        assert caught.value.reason is Reason.INVALID_REQUEST

    @rule(which=WHICH, back=st.integers(0, 3), gang=st.booleans(), min_ready=st.integers(0, 2))
    def activate(self, which: int, back: int, gang: bool, min_ready: int) -> None:
        run_id = self.run(which)
        policy = ActivationPolicy.GANG if gang else ActivationPolicy.ROLLING
        try:
            version = max(0, self.next_version[run_id] - 1 - back)
            asked = ActivationRequest(
                run_id=run_id, version=version, policy=policy, min_ready=min_ready, prepare_deadline_s=30.0
            )
            record, actions = self.coordinator.line(run_id).activate(asked, self.now_s)
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

    @rule(which=WHICH, content=st.integers(0, 3), gang=st.booleans(), min_ready=st.integers(0, 2), transport=TRANSPORTS)
    def publish_and_activate(self, which: int, content: int, gang: bool, min_ready: int, transport: Transport) -> None:
        self.publish(which, content, True, 0, transport, False)
        self.activate(which, 0, gang, min_ready)

    @rule(which=WHICH, back=st.integers(0, 2), really=RARELY)
    def abort(self, which: int, back: int, really: bool) -> None:
        run_id = self.run(which)
        line = self.line(run_id)
        if not really or line is None:
            return
        version = max(0, self.next_version[run_id] - 1 - back)
        record = line.records.get(hub.Key(run_id, line.epoch, version))
        try:
            _, actions = line.abort(epoch=line.epoch, version=version, artifact_id="", message="", now_s=self.now_s)
            self.take(actions)
        except MeshError as error:
            if error.reason is Reason.VERSION_DECIDED:
                assert record is not None
                assert record.deciding or record.state not in hub.UNDECIDED
            else:
                expected(error, Reason.UNKNOWN_RUN, Reason.UNKNOWN_VERSION)
