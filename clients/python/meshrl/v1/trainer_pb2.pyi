import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from meshrl.v1 import access_pb2 as _access_pb2
from meshrl.v1 import runs_pb2 as _runs_pb2
from meshrl.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STATE_UNSPECIFIED: _ClassVar[StepState]
    STEP_STATE_QUEUED: _ClassVar[StepState]
    STEP_STATE_RUNNING: _ClassVar[StepState]
    STEP_STATE_DONE: _ClassVar[StepState]
    STEP_STATE_FAILED: _ClassVar[StepState]

class CheckpointState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_STATE_UNSPECIFIED: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_SAVING: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_DURABLE: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_FAILED: _ClassVar[CheckpointState]
STEP_STATE_UNSPECIFIED: StepState
STEP_STATE_QUEUED: StepState
STEP_STATE_RUNNING: StepState
STEP_STATE_DONE: StepState
STEP_STATE_FAILED: StepState
CHECKPOINT_STATE_UNSPECIFIED: CheckpointState
CHECKPOINT_STATE_SAVING: CheckpointState
CHECKPOINT_STATE_DURABLE: CheckpointState
CHECKPOINT_STATE_FAILED: CheckpointState

class GetTrainerRequest(_message.Message):
    __slots__ = ("contract_version", "capabilities")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contract_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class GetTrainerResponse(_message.Message):
    __slots__ = ("contract_version", "world_size", "dp_size", "seq_len", "pad_multiple", "objective", "model", "runs", "max_queued_batches", "vocab_size", "max_message_bytes", "min_shared_prefix", "router_replay", "capabilities", "max_runs", "max_adapter_rank", "adapter_bytes_total", "adapter_bytes_used", "losses", "default_adapter")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    PAD_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_SHARED_PREFIX_FIELD_NUMBER: _ClassVar[int]
    ROUTER_REPLAY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    world_size: int
    dp_size: int
    seq_len: int
    pad_multiple: int
    objective: str
    model: str
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    max_queued_batches: int
    vocab_size: int
    max_message_bytes: int
    min_shared_prefix: float
    router_replay: RoutedShape
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    max_runs: int
    max_adapter_rank: int
    adapter_bytes_total: int
    adapter_bytes_used: int
    losses: _containers.RepeatedScalarFieldContainer[str]
    default_adapter: _runs_pb2.AdapterSpec
    def __init__(self, contract_version: _Optional[str] = ..., world_size: _Optional[int] = ..., dp_size: _Optional[int] = ..., seq_len: _Optional[int] = ..., pad_multiple: _Optional[int] = ..., objective: _Optional[str] = ..., model: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., max_queued_batches: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., min_shared_prefix: _Optional[float] = ..., router_replay: _Optional[_Union[RoutedShape, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ..., max_runs: _Optional[int] = ..., max_adapter_rank: _Optional[int] = ..., adapter_bytes_total: _Optional[int] = ..., adapter_bytes_used: _Optional[int] = ..., losses: _Optional[_Iterable[str]] = ..., default_adapter: _Optional[_Union[_runs_pb2.AdapterSpec, _Mapping]] = ...) -> None: ...

class RoutedShape(_message.Message):
    __slots__ = ("layers", "per_token", "experts")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    per_token: int
    experts: int
    def __init__(self, layers: _Optional[int] = ..., per_token: _Optional[int] = ..., experts: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run_id", "step", "version", "epoch", "revision", "durable_step", "phase", "suspension", "spec", "create_time", "update_time", "tokens", "queued_batches", "used_share", "oldest_revision", "adapter_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SUSPENSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    USED_SHARE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    version: int
    epoch: int
    revision: int
    durable_step: int
    phase: _runs_pb2.RunPhase
    suspension: _runs_pb2.Suspension
    spec: _runs_pb2.RunSpec
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    tokens: int
    queued_batches: int
    used_share: float
    oldest_revision: int
    adapter_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., durable_step: _Optional[int] = ..., phase: _Optional[_Union[_runs_pb2.RunPhase, str]] = ..., suspension: _Optional[_Union[_runs_pb2.Suspension, _Mapping]] = ..., spec: _Optional[_Union[_runs_pb2.RunSpec, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tokens: _Optional[int] = ..., queued_batches: _Optional[int] = ..., used_share: _Optional[float] = ..., oldest_revision: _Optional[int] = ..., adapter_bytes: _Optional[int] = ...) -> None: ...

class SubmitBatchRequest(_message.Message):
    __slots__ = ("header", "micro_batch")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    header: BatchHeader
    micro_batch: MicroBatch
    def __init__(self, header: _Optional[_Union[BatchHeader, _Mapping]] = ..., micro_batch: _Optional[_Union[MicroBatch, _Mapping]] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("run_id", "step", "digest", "num_micro_batches", "loss_tokens", "environments", "traceparent", "logprob_rollouts", "routes_digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    digest: str
    num_micro_batches: int
    loss_tokens: int
    environments: _containers.RepeatedScalarFieldContainer[str]
    traceparent: str
    logprob_rollouts: _containers.RepeatedScalarFieldContainer[str]
    routes_digest: str
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., digest: _Optional[str] = ..., num_micro_batches: _Optional[int] = ..., loss_tokens: _Optional[int] = ..., environments: _Optional[_Iterable[str]] = ..., traceparent: _Optional[str] = ..., logprob_rollouts: _Optional[_Iterable[str]] = ..., routes_digest: _Optional[str] = ...) -> None: ...

class MicroBatch(_message.Message):
    __slots__ = ("dp_rank", "token_ids", "position_ids", "loss_mask", "advantages", "inference_logprobs", "sample_offsets", "temperatures", "env_index", "rollout_ids", "traceparents", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs", "prefix_tokens", "prefix_samples", "ref_top_ids", "ref_top_logprobs", "routed_experts")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    ENV_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    RL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REF_KL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REF_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REF_TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    REF_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    token_ids: _tensor_pb2.Tensor
    position_ids: _tensor_pb2.Tensor
    loss_mask: _tensor_pb2.Tensor
    advantages: _tensor_pb2.Tensor
    inference_logprobs: _tensor_pb2.Tensor
    sample_offsets: _tensor_pb2.Tensor
    temperatures: _tensor_pb2.Tensor
    env_index: _tensor_pb2.Tensor
    rollout_ids: _containers.RepeatedScalarFieldContainer[str]
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    rl_weights: _tensor_pb2.Tensor
    ce_weights: _tensor_pb2.Tensor
    ref_kl_weights: _tensor_pb2.Tensor
    ref_logprobs: _tensor_pb2.Tensor
    prefix_tokens: _tensor_pb2.Tensor
    prefix_samples: _tensor_pb2.Tensor
    ref_top_ids: _tensor_pb2.Tensor
    ref_top_logprobs: _tensor_pb2.Tensor
    routed_experts: _tensor_pb2.Tensor
    def __init__(self, dp_rank: _Optional[int] = ..., token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., position_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., loss_mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., advantages: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., inference_logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sample_offsets: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., temperatures: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., env_index: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rollout_ids: _Optional[_Iterable[str]] = ..., traceparents: _Optional[_Iterable[str]] = ..., rl_weights: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ce_weights: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ref_kl_weights: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ref_logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., prefix_tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., prefix_samples: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ref_top_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ref_top_logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SubmitBatchResponse(_message.Message):
    __slots__ = ("revision", "queue_position")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    queue_position: int
    def __init__(self, revision: _Optional[int] = ..., queue_position: _Optional[int] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("run_id", "after_revision", "from_now", "bookmark_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    FROM_NOW_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after_revision: int
    from_now: bool
    bookmark_s: float
    def __init__(self, run_id: _Optional[str] = ..., after_revision: _Optional[int] = ..., from_now: bool = ..., bookmark_s: _Optional[float] = ...) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("revision", "step", "state", "version", "metrics", "timings_s", "reason", "message", "traceparent", "durable_step", "logprobs", "entropies", "bookmark", "artifact_id", "time")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TimingsSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    revision: int
    step: int
    state: StepState
    version: int
    metrics: _containers.ScalarMap[str, float]
    timings_s: _containers.ScalarMap[str, float]
    reason: str
    message: str
    traceparent: str
    durable_step: int
    logprobs: _containers.RepeatedCompositeFieldContainer[RolloutLogprobs]
    entropies: _tensor_pb2.Tensor
    bookmark: bool
    artifact_id: str
    time: _timestamp_pb2.Timestamp
    def __init__(self, revision: _Optional[int] = ..., step: _Optional[int] = ..., state: _Optional[_Union[StepState, str]] = ..., version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., timings_s: _Optional[_Mapping[str, float]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., traceparent: _Optional[str] = ..., durable_step: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[RolloutLogprobs, _Mapping]]] = ..., entropies: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., bookmark: bool = ..., artifact_id: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RolloutLogprobs(_message.Message):
    __slots__ = ("rollout_id", "logprobs")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    logprobs: _tensor_pb2.Tensor
    def __init__(self, rollout_id: _Optional[str] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "weights_only", "name", "return_at_once")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RETURN_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    weights_only: bool
    name: str
    return_at_once: bool
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., weights_only: bool = ..., name: _Optional[str] = ..., return_at_once: bool = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("step", "path", "checkpoint")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    checkpoint: Checkpoint
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("run_id", "step", "state", "path", "weights_only", "name", "request_id", "create_time", "end_time", "num_bytes", "reason", "message")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    state: CheckpointState
    path: str
    weights_only: bool
    name: str
    request_id: str
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    num_bytes: int
    reason: str
    message: str
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., state: _Optional[_Union[CheckpointState, str]] = ..., path: _Optional[str] = ..., weights_only: bool = ..., name: _Optional[str] = ..., request_id: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., num_bytes: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("run_id", "page_size", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    page_size: int
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "next_page_token")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    next_page_token: str
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "spec")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    spec: _runs_pb2.RunSpec
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., spec: _Optional[_Union[_runs_pb2.RunSpec, _Mapping]] = ...) -> None: ...

class CreateRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class SuspendRunRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class SuspendRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ("request_id", "run_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class ResumeRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs", "next_page_token")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    next_page_token: str
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteRunRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "keep_checkpoints", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    keep_checkpoints: bool
    message: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., keep_checkpoints: bool = ..., message: _Optional[str] = ...) -> None: ...

class DeleteRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("request_id", "deadline_s", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    deadline_s: float
    message: str
    def __init__(self, request_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., message: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("step", "dropped_batches")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    step: int
    dropped_batches: int
    def __init__(self, step: _Optional[int] = ..., dropped_batches: _Optional[int] = ...) -> None: ...
