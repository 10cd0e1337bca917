import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from meshrl.v1 import access_pb2 as _access_pb2
from meshrl.v1 import runs_pb2 as _runs_pb2
from meshrl.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ("contract_version", "capabilities")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contract_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("contract_version", "environments", "capabilities")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    environments: _containers.RepeatedCompositeFieldContainer[Environment]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contract_version: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[Environment, _Mapping]]] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class Environment(_message.Message):
    __slots__ = ("name", "taskset", "num_tasks", "agents", "default_sampling", "package_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TASKSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    taskset: str
    num_tasks: int
    agents: _containers.RepeatedScalarFieldContainer[str]
    default_sampling: Sampling
    package_version: str
    def __init__(self, name: _Optional[str] = ..., taskset: _Optional[str] = ..., num_tasks: _Optional[int] = ..., agents: _Optional[_Iterable[str]] = ..., default_sampling: _Optional[_Union[Sampling, _Mapping]] = ..., package_version: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop_token_ids", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ...) -> None: ...

class RunRolloutsRequest(_message.Message):
    __slots__ = ("request_id", "group_id", "environment", "task_index", "task_payload", "group_size", "sampling", "engine_pool", "min_version", "exact_version", "deadline_s", "traceparent", "scores_only", "conversations", "routed_experts", "run_id", "linger_s", "after_seq")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    TASK_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_POOL_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SCORES_ONLY_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINGER_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    group_id: str
    environment: str
    task_index: int
    task_payload: str
    group_size: int
    sampling: Sampling
    engine_pool: str
    min_version: int
    exact_version: int
    deadline_s: float
    traceparent: str
    scores_only: bool
    conversations: bool
    routed_experts: bool
    run_id: str
    linger_s: float
    after_seq: int
    def __init__(self, request_id: _Optional[str] = ..., group_id: _Optional[str] = ..., environment: _Optional[str] = ..., task_index: _Optional[int] = ..., task_payload: _Optional[str] = ..., group_size: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., engine_pool: _Optional[str] = ..., min_version: _Optional[int] = ..., exact_version: _Optional[int] = ..., deadline_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., scores_only: bool = ..., conversations: bool = ..., routed_experts: bool = ..., run_id: _Optional[str] = ..., linger_s: _Optional[float] = ..., after_seq: _Optional[int] = ...) -> None: ...

class RunRolloutsResponse(_message.Message):
    __slots__ = ("rollout", "failure", "summary", "routed_experts_part", "seq")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_PART_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    rollout: Rollout
    failure: RolloutFailure
    summary: RolloutSummary
    routed_experts_part: RoutedExpertsPart
    seq: int
    def __init__(self, rollout: _Optional[_Union[Rollout, _Mapping]] = ..., failure: _Optional[_Union[RolloutFailure, _Mapping]] = ..., summary: _Optional[_Union[RolloutSummary, _Mapping]] = ..., routed_experts_part: _Optional[_Union[RoutedExpertsPart, _Mapping]] = ..., seq: _Optional[int] = ...) -> None: ...

class RoutedExpertsPart(_message.Message):
    __slots__ = ("rollout_id", "sample", "routed_experts")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    sample: int
    routed_experts: _tensor_pb2.Tensor
    def __init__(self, rollout_id: _Optional[str] = ..., sample: _Optional[int] = ..., routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("rollout_id", "group_id", "task_key", "environment", "agent", "samples", "reward", "reward_parts", "metrics", "finish_reason", "truncated", "num_turns", "timings_s", "traceparent", "completion", "episode_id", "conversations", "run_id", "start_time", "end_time", "attestation")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
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
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_KEY_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    group_id: str
    task_key: str
    environment: str
    agent: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    metrics: _containers.ScalarMap[str, float]
    finish_reason: str
    truncated: bool
    num_turns: int
    timings_s: _containers.ScalarMap[str, float]
    traceparent: str
    completion: str
    episode_id: str
    conversations: _containers.RepeatedScalarFieldContainer[str]
    run_id: str
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    attestation: Attestation
    def __init__(self, rollout_id: _Optional[str] = ..., group_id: _Optional[str] = ..., task_key: _Optional[str] = ..., environment: _Optional[str] = ..., agent: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., finish_reason: _Optional[str] = ..., truncated: bool = ..., num_turns: _Optional[int] = ..., timings_s: _Optional[_Mapping[str, float]] = ..., traceparent: _Optional[str] = ..., completion: _Optional[str] = ..., episode_id: _Optional[str] = ..., conversations: _Optional[_Iterable[str]] = ..., run_id: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attestation: _Optional[_Union[Attestation, _Mapping]] = ...) -> None: ...

class Attestation(_message.Message):
    __slots__ = ("kind", "key_id", "statement_digest", "evidence")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    key_id: str
    statement_digest: bytes
    evidence: bytes
    def __init__(self, kind: _Optional[str] = ..., key_id: _Optional[str] = ..., statement_digest: _Optional[bytes] = ..., evidence: _Optional[bytes] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("token_ids", "loss_mask", "logprobs", "version_spans", "message_spans", "temperature", "routed_experts", "media", "advantages")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_SPANS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _tensor_pb2.Tensor
    loss_mask: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    message_spans: _containers.RepeatedCompositeFieldContainer[MessageSpan]
    temperature: float
    routed_experts: _tensor_pb2.Tensor
    media: _containers.RepeatedCompositeFieldContainer[Media]
    advantages: _tensor_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., loss_mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., message_spans: _Optional[_Iterable[_Union[MessageSpan, _Mapping]]] = ..., temperature: _Optional[float] = ..., routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., media: _Optional[_Iterable[_Union[Media, _Mapping]]] = ..., advantages: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("media_type", "start", "end", "digest", "data", "tensors")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    media_type: str
    start: int
    end: int
    digest: bytes
    data: bytes
    tensors: _containers.MessageMap[str, _tensor_pb2.Tensor]
    def __init__(self, media_type: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., digest: _Optional[bytes] = ..., data: _Optional[bytes] = ..., tensors: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "end", "version", "prompt_version")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    version: int
    prompt_version: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., version: _Optional[int] = ..., prompt_version: _Optional[int] = ...) -> None: ...

class MessageSpan(_message.Message):
    __slots__ = ("start", "end", "role", "text", "content_start", "content_end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_START_FIELD_NUMBER: _ClassVar[int]
    CONTENT_END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    role: str
    text: str
    content_start: int
    content_end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., role: _Optional[str] = ..., text: _Optional[str] = ..., content_start: _Optional[int] = ..., content_end: _Optional[int] = ...) -> None: ...

class RolloutFailure(_message.Message):
    __slots__ = ("rollout_id", "group_id", "reason", "message", "retryable", "traceparent")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    group_id: str
    reason: str
    message: str
    retryable: bool
    traceparent: str
    def __init__(self, rollout_id: _Optional[str] = ..., group_id: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ..., traceparent: _Optional[str] = ...) -> None: ...

class RolloutSummary(_message.Message):
    __slots__ = ("finished", "failed", "cancelled", "sampled_tokens")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    finished: int
    failed: int
    cancelled: int
    sampled_tokens: int
    def __init__(self, finished: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., sampled_tokens: _Optional[int] = ...) -> None: ...

class CancelRolloutsRequest(_message.Message):
    __slots__ = ("request_id", "group_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelRolloutsResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...

class GetRolloutStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRolloutStatusResponse(_message.Message):
    __slots__ = ("running", "queued", "finished", "failures", "rollouts_per_s", "engines", "draining", "max_concurrent", "limit_reason")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_REASON_FIELD_NUMBER: _ClassVar[int]
    running: int
    queued: int
    finished: int
    failures: _containers.ScalarMap[str, int]
    rollouts_per_s: float
    engines: _containers.RepeatedCompositeFieldContainer[EngineEndpoint]
    draining: bool
    max_concurrent: int
    limit_reason: str
    def __init__(self, running: _Optional[int] = ..., queued: _Optional[int] = ..., finished: _Optional[int] = ..., failures: _Optional[_Mapping[str, int]] = ..., rollouts_per_s: _Optional[float] = ..., engines: _Optional[_Iterable[_Union[EngineEndpoint, _Mapping]]] = ..., draining: bool = ..., max_concurrent: _Optional[int] = ..., limit_reason: _Optional[str] = ...) -> None: ...

class EngineEndpoint(_message.Message):
    __slots__ = ("url", "healthy", "version", "in_flight", "logprobs_mode", "slots", "kv_tokens", "served")
    URL_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    url: str
    healthy: bool
    version: int
    in_flight: int
    logprobs_mode: str
    slots: int
    kv_tokens: int
    served: _containers.RepeatedCompositeFieldContainer[_runs_pb2.ServedVersion]
    def __init__(self, url: _Optional[str] = ..., healthy: bool = ..., version: _Optional[int] = ..., in_flight: _Optional[int] = ..., logprobs_mode: _Optional[str] = ..., slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., served: _Optional[_Iterable[_Union[_runs_pb2.ServedVersion, _Mapping]]] = ...) -> None: ...

class RolloutServiceDrainRequest(_message.Message):
    __slots__ = ("request_id", "deadline_s", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    deadline_s: float
    message: str
    def __init__(self, request_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., message: _Optional[str] = ...) -> None: ...

class RolloutServiceDrainResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...
