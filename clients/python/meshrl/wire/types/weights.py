"""Versions, the engines that serve them, and the hub's commands to agents."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from meshrl.wire.types.runs import ServedVersion
from meshrl.wire.values import YOUNGER


class Transport(enum.Enum):
    FILESYSTEM = "filesystem"
    STREAM = "stream"
    NCCL = "nccl"


class VersionKind(enum.Enum):
    FULL = "full"
    DELTA = "delta"
    LORA = "lora"


class VersionState(enum.Enum):
    STAGING = "staging"
    SEALED = "sealed"
    COMMITTING = "committing"
    COMMITTED = "committed"
    RETIRED = "retired"
    ABORTED = "aborted"


class AgentState(enum.Enum):
    JOINING = "joining"
    SEEDING = "seeding"
    READY = "ready"
    FETCHING = "fetching"
    PREPARED = "prepared"
    APPLYING = "applying"
    POISONED = "poisoned"


class ActivationPolicy(enum.Enum):
    GANG = "gang"
    ROLLING = "rolling"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """`dtype` is a name of `tensors.DTYPES`; `digest` is set once known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    digest: bytes = b""


@dataclass(frozen=True, kw_only=True)
class ChunkEntry:
    """Bytes [offset, offset + length) of a version and their BLAKE3."""

    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file that holds `num_bytes` of the byte stream from `offset`."""

    path: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """See weights.proto."""

    num_senders: int
    bucket_bytes: int
    whole_tensors: tuple[int, ...] = ()
    reordered_tensors: tuple[int, ...] = field(default=(), metadata=YOUNGER)
    row_order: tuple[int, ...] = field(default=(), metadata=YOUNGER)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter: a layer computes base(x) + lora_alpha / rank * B(A(x))."""

    rank: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    base_model: str = ""


@dataclass(frozen=True, kw_only=True)
class VersionProbe:
    """P prompt tokens, and the trainer's P - 1 logprobs of them, in nats, without the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A version's content; `manifest.artifact_id` hashes all but the `probe`."""

    run_id: str
    epoch: int
    version: int
    kind: VersionKind = VersionKind.FULL
    transport: Transport
    base_version: int | None = None
    base_root: bytes = b""
    result_root: bytes
    layout_signature: bytes
    codec: str = "raw"
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[ChunkEntry, ...]
    files: tuple[FileEntry, ...] = ()
    digest_algorithm: str = ""
    collective: CollectivePlan | None = None
    adapter: AdapterConfig | None = None
    probe: VersionProbe | None = field(default=None, metadata=YOUNGER)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def payload_bytes(self) -> int:
        """That travel: the weights', or the delta's."""
        if self.kind is not VersionKind.DELTA:
            return self.num_bytes
        return self.chunks[-1].offset + self.chunks[-1].length if self.chunks else 0


@dataclass(frozen=True, kw_only=True)
class FoundVersion:
    """Of a delta, `steps` are the manifests to fetch and apply, in order."""

    manifest: Manifest
    artifact_id: str
    steps: tuple[Manifest, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AgentRegistration:
    engine_id: str
    url: str
    engine_pool: str = ""
    transports: tuple[Transport, ...]
    layout_signature: bytes
    held_version: int | None = None
    held_root: bytes = b""
    collective_ranks: int = 0
    collective_backend: str = ""
    host: str = ""
    can_sleep: bool = False
    max_adapters: int = 0
    max_adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    served: tuple[ServedVersion, ...] = ()
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lease:
    lease_id: str
    lease_s: float
    max_chunk_bytes: int
    committed_version: int | None


@dataclass(frozen=True, kw_only=True)
class AgentFault:
    """`reason` is from the error catalogue."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class ApplyReport:
    """`pause_s`: generation stood still. `prepare_s`: fetch and verify. `probe_error`: mean distance in nats of the
    engine's logprobs from the probe's."""

    version: int
    root: bytes
    pause_s: float
    prepare_s: float
    requests_kept: int
    run_id: str = ""
    probe_error: float | None = field(default=None, metadata=YOUNGER)


@dataclass(frozen=True, kw_only=True)
class AgentReport:
    """An agent's message and heartbeat. `target_artifact_id` is the content of `target_version`. State, target,
    fault and applied are of `run_id`; `served` are versions of all runs. `sleep_answered` is the number of the last
    Sleep that was carried out (then `sleeping`) or declined."""

    lease_id: str
    state: AgentState
    serving_version: int | None = None
    target_version: int | None = None
    fault: AgentFault | None = None
    applied: ApplyReport | None = None
    group_generation: int | None = None
    target_artifact_id: str = ""
    sleeping: bool = False
    sleep_answered: int | None = None
    run_id: str = ""
    served: tuple[ServedVersion, ...] = ()
    target_epoch: int = 0


@dataclass(frozen=True, kw_only=True)
class VersionCommand:
    """Hubs of 1.0 name neither run nor epoch, nor what they abort and resume."""

    version: int
    artifact_id: str = ""
    run_id: str = ""
    epoch: int = 0


class Prepare(VersionCommand):
    """Fetch a version and stage it."""


@dataclass(frozen=True, kw_only=True)
class Commit(VersionCommand):
    """Serve a version; with `hold`, stay paused until Resume."""

    hold: bool = False


class Abort(VersionCommand):
    """Drop what was fetched of a version."""


class Resume(VersionCommand):
    """End the pause that a Commit has held."""


class Retire(VersionCommand):
    """Let a version go once its last request ends."""


@dataclass(frozen=True, kw_only=True)
class DrainAgent:
    pass


@dataclass(frozen=True, kw_only=True)
class JoinGroup:
    """In each sender's communicator the sender is rank 0, receiver i rank 1 + i."""

    generation: int
    store_address: str
    backend: str
    num_senders: int
    num_receivers: int
    first_receiver: int
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """Give memory back until the next version or request, unless there is work. `number` is for the answer."""

    number: int


AgentCommand = Prepare | Commit | Abort | Resume | DrainAgent | JoinGroup | Sleep | Retire


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """Receivers [first_receiver, first_receiver + num_ranks)."""

    engine_id: str
    first_receiver: int
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class OpenedGroup:
    generation: int
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a version's byte stream; `crc32c` is over `data`."""

    offset: int
    data: bytes | memoryview
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class StagedVersion:
    """`missing_offsets` is empty when it can be sealed. `raw_port` takes chunks over HTTP; 0 is none."""

    artifact_id: str
    missing_offsets: tuple[int, ...]
    max_chunk_bytes: int
    raw_port: int = 0


@dataclass(frozen=True, kw_only=True)
class VersionInfo:
    """`seal_time` is in seconds of the epoch."""

    run_id: str
    epoch: int
    version: int
    artifact_id: str
    state: VersionState
    num_bytes: int
    transport: Transport
    traceparent: str = ""
    seal_time: float | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class VersionEvent:
    revision: int
    version: VersionInfo


@dataclass(frozen=True, kw_only=True)
class ActivationRequest:
    """Epoch 0 and an empty artifact are any; `min_ready` 0 is every live engine."""

    run_id: str
    version: int
    policy: ActivationPolicy = ActivationPolicy.ROLLING
    min_ready: int = 0
    prepare_deadline_s: float
    artifact_id: str = ""
    epoch: int = 0
    return_when_decided: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    engine_id: str
    applied: ApplyReport


@dataclass(frozen=True, kw_only=True)
class Activation:
    """`commit_s`: decision to last report; `lag_s`: seal to last report."""

    version: VersionInfo
    engines: tuple[EngineReport, ...]
    commit_s: float
    lag_s: float


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    engine_id: str
    url: str
    engine_pool: str
    state: AgentState
    serving_version: int | None
    routable: bool
    last_seen_s: float
    last_fault: AgentFault | None = None
    transports: tuple[Transport, ...] = ()
    collective_ranks: int = 0
    collective_backend: str = ""
    group_generation: int | None = None
    host: str = ""
    sleeping: bool = False
    can_sleep: bool = False
    layout_signature: bytes = b""
    served: tuple[ServedVersion, ...] = ()
    last_seen_time: float | None = field(default=None, compare=False)  # seconds of the epoch
    max_adapters: int = 0
    max_adapter_rank: int = 0
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SleepOutcome:
    """Engines asleep, and awake (no sleep mode, work, or no answer)."""

    asleep: int
    awake: int
    seconds: float
