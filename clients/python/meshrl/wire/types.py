"""The messages of a run as frozen dataclasses; `convert` is the only place that turns them into protobuf.

Array shapes are written as suffixes of comments: T tokens of a sample or micro-batch, S samples.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

CONTRACT_VERSION = "1.0"


# --- rollouts -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample tokens; a field left at None takes the environment's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def over(self, default: Sampling) -> Sampling:
        """Returns this sampling with its unset fields taken from `default`."""
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=default.top_p if self.top_p is None else self.top_p,
            top_k=default.top_k if self.top_k is None else self.top_k,
            min_p=default.min_p if self.min_p is None else self.min_p,
            max_tokens=default.max_tokens if self.max_tokens is None else self.max_tokens,
            stop_token_ids=self.stop_token_ids or default.stop_token_ids,
            seed=default.seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class EnvironmentInfo:
    """One hosted environment; `num_tasks` is None when the taskset is infinite."""

    name: str
    taskset: str
    num_tasks: int | None
    agents: tuple[str, ...] = ()
    default_sampling: Sampling = field(default_factory=Sampling)
    package_version: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """One group: `group_size` rollouts of one task. At most one of min_version, exact_version."""

    request_id: str
    group_id: str
    environment: str
    task_index: int | None = None
    task_payload: str | None = None
    group_size: int
    sampling: Sampling = field(default_factory=Sampling)
    engine_pool: str = ""
    min_version: int | None = None
    exact_version: int | None = None
    deadline_s: float
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) were sampled by `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """Tokens [start, end) belong to one message of `role`."""

    start: int
    end: int
    role: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One token sequence with what training needs."""

    token_ids: NDArray[np.int32]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,) true where the policy sampled the token
    logprobs: NDArray[np.float32]  # (T,) of the distribution sampled from; 0 where loss_mask is false
    version_spans: tuple[VersionSpan, ...]  # sorted, disjoint, cover loss_mask
    message_spans: tuple[MessageSpan, ...] = ()
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """A finished, scored episode of one agent."""

    rollout_id: str
    group_id: str
    task_key: str
    environment: str
    agent: str = ""
    samples: tuple[Sample, ...]
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    truncated: bool = False
    num_turns: int = 1
    timings_s: Mapping[str, float] = field(default_factory=dict)
    traceparent: str = ""
    completion: str = ""

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that sampled a token of this rollout; None when no token was sampled."""
        return min((span.version for sample in self.samples for span in sample.version_spans), default=None)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, kw_only=True)
class RolloutFailure:
    """A rollout that could not be finished; `reason` is from the error catalogue."""

    rollout_id: str
    group_id: str
    reason: str
    message: str
    retryable: bool


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """End of a group: finished + failed + cancelled is the group size."""

    finished: int
    failed: int
    cancelled: int
    sampled_tokens: int


RolloutEvent = Rollout | RolloutFailure | RolloutSummary


@dataclass(frozen=True, kw_only=True)
class EngineEndpoint:
    """One engine as the rollout server sees it."""

    url: str
    healthy: bool
    version: int | None
    in_flight: int


@dataclass(frozen=True, kw_only=True)
class RolloutStatus:
    """What a rollout server is doing; counts of rollouts, not groups."""

    running: int
    queued: int
    finished: int
    failures: Mapping[str, int]
    rollouts_per_s: float
    engines: tuple[EngineEndpoint, ...]
    draining: bool


# --- batches and steps ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Samples packed into one row; attention never crosses `sample_offsets`."""

    dp_rank: int
    token_ids: NDArray[np.int32]  # (T,)
    position_ids: NDArray[np.int32]  # (T,) restart at 0 with each sample
    loss_mask: NDArray[np.bool_]  # (T,)
    advantages: NDArray[np.float32]  # (T,)
    inference_logprobs: NDArray[np.float32]  # (T,) 0 where loss_mask is false
    sample_offsets: NDArray[np.int64]  # (S + 1,) start of each sample, then T
    temperatures: NDArray[np.float32]  # (S,)
    env_index: NDArray[np.int32]  # (S,) index into Batch.environments
    rollout_ids: tuple[str, ...]  # (S,)
    traceparents: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One step's data. `loss_tokens` counts loss_mask over all micro-batches."""

    run_id: str
    step: int
    micro_batches: tuple[MicroBatch, ...]
    loss_tokens: int
    environments: tuple[str, ...]
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One run of a trainer; `epoch` grows each time the trainer of this run restarts."""

    run_id: str
    step: int
    version: int
    epoch: int
    revision: int


@dataclass(frozen=True, kw_only=True)
class TrainerInfo:
    """What a trainer is and where it stands."""

    world_size: int
    dp_size: int
    seq_len: int
    pad_multiple: int
    objective: str
    model: str
    runs: tuple[RunInfo, ...]
    max_queued_batches: int


class StepState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One event of a run; `version`, `metrics` and `timings_s` are filled when DONE, `reason` when FAILED."""

    revision: int
    step: int
    state: StepState
    version: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings_s: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    traceparent: str = ""


# --- weights --------------------------------------------------------------------------------


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
    """One tensor of a version: `dtype` is a name of `tensors.DTYPES`, `digest` BLAKE3 of the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    digest: bytes


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
class Manifest:
    """Everything that identifies the content of a version; `manifest.artifact_id` hashes it."""

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

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class AgentRegistration:
    """What an agent tells the hub about its engine."""

    engine_id: str
    url: str
    engine_pool: str = ""
    transports: tuple[Transport, ...]
    layout_signature: bytes
    held_version: int | None = None
    held_root: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Lease:
    lease_id: str
    lease_s: float
    max_chunk_bytes: int
    committed_version: int | None


@dataclass(frozen=True, kw_only=True)
class AgentFault:
    """Why an agent could not prepare or apply; `reason` is from the error catalogue."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class ApplyReport:
    """How an engine applied a version. `pause_s`: generation stood still; `prepare_s`: fetch and verify."""

    version: int
    root: bytes
    pause_s: float
    prepare_s: float
    requests_kept: int


@dataclass(frozen=True, kw_only=True)
class AgentReport:
    """One message from an agent; doubles as a heartbeat."""

    lease_id: str
    state: AgentState
    serving_version: int | None = None
    target_version: int | None = None
    fault: AgentFault | None = None
    applied: ApplyReport | None = None


@dataclass(frozen=True, kw_only=True)
class Prepare:
    version: int
    artifact_id: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Serve a version; with `hold`, stay paused until Resume."""

    version: int
    artifact_id: str
    hold: bool = False


@dataclass(frozen=True, kw_only=True)
class Abort:
    version: int


@dataclass(frozen=True, kw_only=True)
class Resume:
    version: int


@dataclass(frozen=True, kw_only=True)
class DrainAgent:
    pass


AgentCommand = Prepare | Commit | Abort | Resume | DrainAgent


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a version's byte stream; `crc32c` is over `data`."""

    offset: int
    data: bytes | memoryview
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class StagedVersion:
    """What the hub holds of an upload; `missing_offsets` is empty when it can be sealed."""

    artifact_id: str
    missing_offsets: tuple[int, ...]
    max_chunk_bytes: int


@dataclass(frozen=True, kw_only=True)
class VersionInfo:
    """A version as the hub sees it."""

    run_id: str
    epoch: int
    version: int
    artifact_id: str
    state: VersionState
    num_bytes: int
    transport: Transport
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True)
class VersionEvent:
    revision: int
    version: VersionInfo


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    engine_id: str
    applied: ApplyReport


@dataclass(frozen=True, kw_only=True)
class Activation:
    """How a commit went. `commit_s`: decision to last report; `lag_s`: seal to last report."""

    version: VersionInfo
    engines: tuple[EngineReport, ...]
    commit_s: float
    lag_s: float


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """One engine as the hub sees it."""

    engine_id: str
    url: str
    engine_pool: str
    state: AgentState
    serving_version: int | None
    routable: bool
    last_seen_s: float
    last_fault: AgentFault | None = None
