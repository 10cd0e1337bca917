"""The hub's rules without a hub: engines say things, what they are told is kept, all that is saved is durable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.engine_groups import BroadcastRequest
from meshrl.weights.coordinator.line import LineLimits
from meshrl.weights.coordinator.states import Action, Answer, Save, Send
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import artifact_id, build_manifest, layout_signature
from meshrl.wire.types import (
    Activation,
    ActivationRequest,
    AgentCommand,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    ChunkEntry,
    CollectivePlan,
    Manifest,
    OpenedGroup,
    TensorEntry,
    Transport,
)

BOTH = (Transport.STREAM, Transport.NCCL)
LAYOUT = layout_signature([("w", "float32", (1,))])
"""Of every version that `manifest` makes."""


def manifest(version: int, *, epoch: int = 1, transport: Transport = Transport.NCCL) -> Manifest:
    tensor = TensorEntry(name="w", dtype="float32", shape=(1,), offset=0, num_bytes=4, digest=bytes((version,)) * 16)
    collective = transport is Transport.NCCL
    return build_manifest(
        run_id="run",
        epoch=epoch,
        version=version,
        transport=transport,
        tensors=(tensor,),
        chunks=() if collective else (ChunkEntry(offset=0, length=4, digest=b"c"),),
        collective=CollectivePlan(num_senders=1, bucket_bytes=64) if collective else None,
    )


def copy_of(made: Manifest) -> Manifest:
    """What a publisher brings the hub of a version that it has broadcast."""
    chunks = (ChunkEntry(offset=0, length=4, digest=b"c"),)
    return replace(made, transport=Transport.STREAM, collective=None, chunks=chunks)


def saved_over(disk: Save | None, rows: Save) -> Save:
    """All rows that are durable once `rows` are."""
    before = Save(run={}) if disk is None else disk
    versions = {key: row for key, row in {**before.versions, **rows.versions}.items() if row is not None}
    groups = {key: row for key, row in {**before.groups, **rows.groups}.items() if row is not None}
    return Save(run=rows.run, versions=versions, groups=groups)


class Hub:
    """The hub's rules with what it saved and sent: everything saved is durable at once."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.disk: Save | None = None
        self.told: dict[str, list[AgentCommand]] = {}
        self.answers: list[Activation | MeshError] = []
        self.requests = 0
        self.restart()

    def restart(self) -> None:
        limits = LineLimits(keep_versions=2, min_engines=1, commit_deadline_s=20.0)
        self.rules = Coordinator(limits, lease_s=10.0, max_chunk_bytes=2**20)
        self.rules.recover(self.disk, self.now_s, self.now_s + 1e9)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Save):
                self.disk = saved_over(self.disk, action)
                if action.decision is not None:
                    self.take(self.rules.decided(action.decision, self.now_s))
            elif isinstance(action, Send):
                self.told.setdefault(action.engine_id, []).append(action.command)
            elif isinstance(action, Answer):
                self.answers.append(action.result)

    def heard(self, engine_id: str) -> list[AgentCommand]:
        """What an engine was told since the last look."""
        return self.told.pop(engine_id, [])

    def engine(self, engine_id: str, *, ranks: int = 1, backend: str = "gloo", **more: Any) -> None:
        registration = AgentRegistration(
            engine_id=engine_id,
            url="http://e",
            transports=more.pop("transports", BOTH),
            layout_signature=more.pop("layout_signature", LAYOUT),
            collective_ranks=ranks,
            collective_backend=backend,
            host="here",
        )
        _, actions = self.rules.register(registration, f"lease-{engine_id}", self.now_s)
        self.take(actions)
        if more.pop("connected", True):
            self.say(engine_id, AgentState.JOINING, **more)
            self.take(self.rules.connect(f"lease-{engine_id}", self.now_s))

    def say(self, engine_id: str, state: AgentState = AgentState.JOINING, **more: Any) -> None:
        report = AgentReport(lease_id=f"lease-{engine_id}", state=state, **more)
        self.take(self.rules.report(report, self.now_s))

    def open(self, **more: Any) -> OpenedGroup:
        self.requests += 1
        fields: dict[str, Any] = {
            "request_id": f"request-{self.requests}",
            "run_id": "run",
            "epoch": 1,
            "store_address": "h:1",
            "backend": "gloo",
            "num_senders": 1,
            "deadline_s": 30.0,
        }
        opened, actions = self.rules.open_group(BroadcastRequest(**{**fields, **more}), self.now_s, self.now_s + 1e9)
        self.take(actions)
        return opened

    def seal(self, made: Manifest) -> str:
        record, actions = self.rules.stage(made, artifact_id(made))
        self.take(actions)
        self.take(self.rules.seal(record.key, "", self.now_s, self.now_s))
        return record.artifact_id

    def copy(self, made: Manifest) -> None:
        copy = copy_of(made)
        record, actions = self.rules.stage(copy, artifact_id(copy))
        self.take(actions)
        self.take(self.rules.copied(record, self.now_s))

    def activate(self, version: int, *, min_ready: int = 0) -> None:
        asked = ActivationRequest(run_id="run", version=version, min_ready=min_ready, prepare_deadline_s=20.0)
        _, actions = self.rules.line("run").activate(asked, self.now_s)
        self.take(actions)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.rules.tick(self.now_s))

    def prepared(self, engine_id: str, made: Manifest, generation: int) -> None:
        self.say(
            engine_id,
            AgentState.PREPARED,
            target_version=made.version,
            target_artifact_id=artifact_id(made),
            group_generation=generation,
        )

    def serves(self, engine_id: str, made: Manifest, generation: int | None) -> None:
        applied = ApplyReport(version=made.version, root=made.result_root, pause_s=0.1, prepare_s=0.1, requests_kept=0)
        self.say(
            engine_id,
            AgentState.READY,
            serving_version=made.version,
            applied=applied,
            group_generation=generation,
        )
