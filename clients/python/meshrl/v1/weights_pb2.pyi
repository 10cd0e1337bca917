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

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_FILESYSTEM: _ClassVar[Transport]
    TRANSPORT_STREAM: _ClassVar[Transport]
    TRANSPORT_NCCL: _ClassVar[Transport]

class VersionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_KIND_UNSPECIFIED: _ClassVar[VersionKind]
    VERSION_KIND_FULL: _ClassVar[VersionKind]
    VERSION_KIND_DELTA: _ClassVar[VersionKind]
    VERSION_KIND_LORA: _ClassVar[VersionKind]

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_STAGING: _ClassVar[VersionState]
    VERSION_STATE_SEALED: _ClassVar[VersionState]
    VERSION_STATE_COMMITTING: _ClassVar[VersionState]
    VERSION_STATE_COMMITTED: _ClassVar[VersionState]
    VERSION_STATE_RETIRED: _ClassVar[VersionState]
    VERSION_STATE_ABORTED: _ClassVar[VersionState]

class AgentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGENT_STATE_UNSPECIFIED: _ClassVar[AgentState]
    AGENT_STATE_JOINING: _ClassVar[AgentState]
    AGENT_STATE_SEEDING: _ClassVar[AgentState]
    AGENT_STATE_READY: _ClassVar[AgentState]
    AGENT_STATE_FETCHING: _ClassVar[AgentState]
    AGENT_STATE_PREPARED: _ClassVar[AgentState]
    AGENT_STATE_APPLYING: _ClassVar[AgentState]
    AGENT_STATE_POISONED: _ClassVar[AgentState]

class ActivationPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVATION_POLICY_UNSPECIFIED: _ClassVar[ActivationPolicy]
    ACTIVATION_POLICY_GANG: _ClassVar[ActivationPolicy]
    ACTIVATION_POLICY_ROLLING: _ClassVar[ActivationPolicy]

class ManifestView(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MANIFEST_VIEW_UNSPECIFIED: _ClassVar[ManifestView]
    MANIFEST_VIEW_HEADER: _ClassVar[ManifestView]
    MANIFEST_VIEW_FULL: _ClassVar[ManifestView]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_FILESYSTEM: Transport
TRANSPORT_STREAM: Transport
TRANSPORT_NCCL: Transport
VERSION_KIND_UNSPECIFIED: VersionKind
VERSION_KIND_FULL: VersionKind
VERSION_KIND_DELTA: VersionKind
VERSION_KIND_LORA: VersionKind
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_STAGING: VersionState
VERSION_STATE_SEALED: VersionState
VERSION_STATE_COMMITTING: VersionState
VERSION_STATE_COMMITTED: VersionState
VERSION_STATE_RETIRED: VersionState
VERSION_STATE_ABORTED: VersionState
AGENT_STATE_UNSPECIFIED: AgentState
AGENT_STATE_JOINING: AgentState
AGENT_STATE_SEEDING: AgentState
AGENT_STATE_READY: AgentState
AGENT_STATE_FETCHING: AgentState
AGENT_STATE_PREPARED: AgentState
AGENT_STATE_APPLYING: AgentState
AGENT_STATE_POISONED: AgentState
ACTIVATION_POLICY_UNSPECIFIED: ActivationPolicy
ACTIVATION_POLICY_GANG: ActivationPolicy
ACTIVATION_POLICY_ROLLING: ActivationPolicy
MANIFEST_VIEW_UNSPECIFIED: ManifestView
MANIFEST_VIEW_HEADER: ManifestView
MANIFEST_VIEW_FULL: ManifestView

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "num_bytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _tensor_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    num_bytes: int
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ChunkEntry(_message.Message):
    __slots__ = ("offset", "length", "digest")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    digest: bytes
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("path", "offset", "num_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    num_bytes: int
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("run_id", "epoch", "version", "kind", "transport", "base_version", "base_root", "result_root", "layout_signature", "codec", "tensors", "chunks", "files", "digest_algorithm", "collective", "adapter", "probe")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_ROOT_FIELD_NUMBER: _ClassVar[int]
    RESULT_ROOT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    version: int
    kind: VersionKind
    transport: Transport
    base_version: int
    base_root: bytes
    result_root: bytes
    layout_signature: bytes
    codec: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkEntry]
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    digest_algorithm: str
    collective: CollectivePlan
    adapter: AdapterConfig
    probe: VersionProbe
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., kind: _Optional[_Union[VersionKind, str]] = ..., transport: _Optional[_Union[Transport, str]] = ..., base_version: _Optional[int] = ..., base_root: _Optional[bytes] = ..., result_root: _Optional[bytes] = ..., layout_signature: _Optional[bytes] = ..., codec: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[ChunkEntry, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ..., digest_algorithm: _Optional[str] = ..., collective: _Optional[_Union[CollectivePlan, _Mapping]] = ..., adapter: _Optional[_Union[AdapterConfig, _Mapping]] = ..., probe: _Optional[_Union[VersionProbe, _Mapping]] = ...) -> None: ...

class VersionProbe(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class CollectivePlan(_message.Message):
    __slots__ = ("num_senders", "bucket_bytes", "whole_tensors", "reordered_tensors", "row_order")
    NUM_SENDERS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_TENSORS_FIELD_NUMBER: _ClassVar[int]
    REORDERED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    ROW_ORDER_FIELD_NUMBER: _ClassVar[int]
    num_senders: int
    bucket_bytes: int
    whole_tensors: _containers.RepeatedScalarFieldContainer[int]
    reordered_tensors: _containers.RepeatedScalarFieldContainer[int]
    row_order: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_senders: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., whole_tensors: _Optional[_Iterable[int]] = ..., reordered_tensors: _Optional[_Iterable[int]] = ..., row_order: _Optional[_Iterable[int]] = ...) -> None: ...

class AdapterConfig(_message.Message):
    __slots__ = ("rank", "lora_alpha", "target_modules", "base_model")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LORA_ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    lora_alpha: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    base_model: str
    def __init__(self, rank: _Optional[int] = ..., lora_alpha: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ..., base_model: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("contract_version", "engine_id", "url", "engine_pool", "transports", "layout_signature", "held_version", "held_root", "collective_ranks", "collective_backend", "host", "can_sleep", "capabilities", "max_adapters", "max_adapter_rank", "adapter_targets", "served")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_POOL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_ROOT_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_BACKEND_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CAN_SLEEP_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_TARGETS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    engine_id: str
    url: str
    engine_pool: str
    transports: _containers.RepeatedScalarFieldContainer[Transport]
    layout_signature: bytes
    held_version: int
    held_root: bytes
    collective_ranks: int
    collective_backend: str
    host: str
    can_sleep: bool
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    max_adapters: int
    max_adapter_rank: int
    adapter_targets: _containers.RepeatedScalarFieldContainer[str]
    served: _containers.RepeatedCompositeFieldContainer[_runs_pb2.ServedVersion]
    def __init__(self, contract_version: _Optional[str] = ..., engine_id: _Optional[str] = ..., url: _Optional[str] = ..., engine_pool: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, str]]] = ..., layout_signature: _Optional[bytes] = ..., held_version: _Optional[int] = ..., held_root: _Optional[bytes] = ..., collective_ranks: _Optional[int] = ..., collective_backend: _Optional[str] = ..., host: _Optional[str] = ..., can_sleep: bool = ..., capabilities: _Optional[_Iterable[str]] = ..., max_adapters: _Optional[int] = ..., max_adapter_rank: _Optional[int] = ..., adapter_targets: _Optional[_Iterable[str]] = ..., served: _Optional[_Iterable[_Union[_runs_pb2.ServedVersion, _Mapping]]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("contract_version", "lease_id", "lease_s", "max_chunk_bytes", "committed_version", "capabilities")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    contract_version: str
    lease_id: str
    lease_s: float
    max_chunk_bytes: int
    committed_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contract_version: _Optional[str] = ..., lease_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., max_chunk_bytes: _Optional[int] = ..., committed_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("lease_id", "state", "serving_version", "target_version", "fault", "applied", "group_generation", "target_artifact_id", "sleeping", "sleep_answered", "run_id", "served", "target_epoch")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SERVING_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    SLEEPING_FIELD_NUMBER: _ClassVar[int]
    SLEEP_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    state: AgentState
    serving_version: int
    target_version: int
    fault: AgentFault
    applied: ApplyReport
    group_generation: int
    target_artifact_id: str
    sleeping: bool
    sleep_answered: int
    run_id: str
    served: _containers.RepeatedCompositeFieldContainer[_runs_pb2.ServedVersion]
    target_epoch: int
    def __init__(self, lease_id: _Optional[str] = ..., state: _Optional[_Union[AgentState, str]] = ..., serving_version: _Optional[int] = ..., target_version: _Optional[int] = ..., fault: _Optional[_Union[AgentFault, _Mapping]] = ..., applied: _Optional[_Union[ApplyReport, _Mapping]] = ..., group_generation: _Optional[int] = ..., target_artifact_id: _Optional[str] = ..., sleeping: bool = ..., sleep_answered: _Optional[int] = ..., run_id: _Optional[str] = ..., served: _Optional[_Iterable[_Union[_runs_pb2.ServedVersion, _Mapping]]] = ..., target_epoch: _Optional[int] = ...) -> None: ...

class AgentFault(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ApplyReport(_message.Message):
    __slots__ = ("version", "root", "pause_s", "prepare_s", "requests_kept", "run_id", "probe_error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_KEPT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROBE_ERROR_FIELD_NUMBER: _ClassVar[int]
    version: int
    root: bytes
    pause_s: float
    prepare_s: float
    requests_kept: int
    run_id: str
    probe_error: float
    def __init__(self, version: _Optional[int] = ..., root: _Optional[bytes] = ..., pause_s: _Optional[float] = ..., prepare_s: _Optional[float] = ..., requests_kept: _Optional[int] = ..., run_id: _Optional[str] = ..., probe_error: _Optional[float] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("prepare", "commit", "abort", "resume", "drain", "join_group", "sleep", "retire")
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    JOIN_GROUP_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    prepare: Prepare
    commit: Commit
    abort: Abort
    resume: Resume
    drain: DrainAgent
    join_group: JoinGroup
    sleep: Sleep
    retire: Retire
    def __init__(self, prepare: _Optional[_Union[Prepare, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., drain: _Optional[_Union[DrainAgent, _Mapping]] = ..., join_group: _Optional[_Union[JoinGroup, _Mapping]] = ..., sleep: _Optional[_Union[Sleep, _Mapping]] = ..., retire: _Optional[_Union[Retire, _Mapping]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("version", "artifact_id", "run_id", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    artifact_id: str
    run_id: str
    epoch: int
    def __init__(self, version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("version", "artifact_id", "hold", "run_id", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    artifact_id: str
    hold: bool
    run_id: str
    epoch: int
    def __init__(self, version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., hold: bool = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("version", "artifact_id", "run_id", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    artifact_id: str
    run_id: str
    epoch: int
    def __init__(self, version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("version", "artifact_id", "run_id", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    artifact_id: str
    run_id: str
    epoch: int
    def __init__(self, version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Retire(_message.Message):
    __slots__ = ("version", "artifact_id", "run_id", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    artifact_id: str
    run_id: str
    epoch: int
    def __init__(self, version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DrainAgent(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinGroup(_message.Message):
    __slots__ = ("generation", "store_address", "backend", "num_senders", "num_receivers", "first_receiver", "deadline_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_SENDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RECEIVER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    store_address: str
    backend: str
    num_senders: int
    num_receivers: int
    first_receiver: int
    deadline_s: float
    def __init__(self, generation: _Optional[int] = ..., store_address: _Optional[str] = ..., backend: _Optional[str] = ..., num_senders: _Optional[int] = ..., num_receivers: _Optional[int] = ..., first_receiver: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class Sleep(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class CreateVersionRequest(_message.Message):
    __slots__ = ("manifest", "chunk", "manifest_part")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_PART_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    chunk: Chunk
    manifest_part: ManifestPart
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., manifest_part: _Optional[_Union[ManifestPart, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data", "crc32c")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class CreateVersionResponse(_message.Message):
    __slots__ = ("artifact_id", "missing_offsets", "max_chunk_bytes", "raw_port")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    MISSING_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_PORT_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    missing_offsets: _containers.RepeatedScalarFieldContainer[int]
    max_chunk_bytes: int
    raw_port: int
    def __init__(self, artifact_id: _Optional[str] = ..., missing_offsets: _Optional[_Iterable[int]] = ..., max_chunk_bytes: _Optional[int] = ..., raw_port: _Optional[int] = ...) -> None: ...

class SealVersionRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "epoch", "version", "artifact_id", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    epoch: int
    version: int
    artifact_id: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class SealVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: VersionInfo
    def __init__(self, version: _Optional[_Union[VersionInfo, _Mapping]] = ...) -> None: ...

class AbortVersionRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "epoch", "version", "message", "artifact_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    epoch: int
    version: int
    message: str
    artifact_id: str
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., message: _Optional[str] = ..., artifact_id: _Optional[str] = ...) -> None: ...

class AbortVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: VersionInfo
    def __init__(self, version: _Optional[_Union[VersionInfo, _Mapping]] = ...) -> None: ...

class ActivateVersionRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "version", "policy", "min_ready", "prepare_deadline_s", "artifact_id", "epoch", "return_when_decided")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MIN_READY_FIELD_NUMBER: _ClassVar[int]
    PREPARE_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RETURN_WHEN_DECIDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    version: int
    policy: ActivationPolicy
    min_ready: int
    prepare_deadline_s: float
    artifact_id: str
    epoch: int
    return_when_decided: bool
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., version: _Optional[int] = ..., policy: _Optional[_Union[ActivationPolicy, str]] = ..., min_ready: _Optional[int] = ..., prepare_deadline_s: _Optional[float] = ..., artifact_id: _Optional[str] = ..., epoch: _Optional[int] = ..., return_when_decided: bool = ...) -> None: ...

class ActivateVersionResponse(_message.Message):
    __slots__ = ("version", "engines", "commit_s", "lag_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    version: VersionInfo
    engines: _containers.RepeatedCompositeFieldContainer[EngineReport]
    commit_s: float
    lag_s: float
    def __init__(self, version: _Optional[_Union[VersionInfo, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineReport, _Mapping]]] = ..., commit_s: _Optional[float] = ..., lag_s: _Optional[float] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("engine_id", "applied")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    applied: ApplyReport
    def __init__(self, engine_id: _Optional[str] = ..., applied: _Optional[_Union[ApplyReport, _Mapping]] = ...) -> None: ...

class WatchVersionsRequest(_message.Message):
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

class WatchVersionsResponse(_message.Message):
    __slots__ = ("revision", "version", "bookmark")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    revision: int
    version: VersionInfo
    bookmark: bool
    def __init__(self, revision: _Optional[int] = ..., version: _Optional[_Union[VersionInfo, _Mapping]] = ..., bookmark: bool = ...) -> None: ...

class VersionInfo(_message.Message):
    __slots__ = ("run_id", "epoch", "version", "artifact_id", "state", "num_bytes", "transport", "traceparent", "seal_time")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SEAL_TIME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    version: int
    artifact_id: str
    state: VersionState
    num_bytes: int
    transport: Transport
    traceparent: str
    seal_time: _timestamp_pb2.Timestamp
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., state: _Optional[_Union[VersionState, str]] = ..., num_bytes: _Optional[int] = ..., transport: _Optional[_Union[Transport, str]] = ..., traceparent: _Optional[str] = ..., seal_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("run_id", "version", "artifact_id", "held_root", "gzip_ok", "view")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_ROOT_FIELD_NUMBER: _ClassVar[int]
    GZIP_OK_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    artifact_id: str
    held_root: bytes
    gzip_ok: bool
    view: ManifestView
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., held_root: _Optional[bytes] = ..., gzip_ok: bool = ..., view: _Optional[_Union[ManifestView, str]] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "artifact_id", "steps", "size", "step_artifact_ids", "raw_port")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_ARTIFACT_IDS_FIELD_NUMBER: _ClassVar[int]
    RAW_PORT_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    artifact_id: str
    steps: _containers.RepeatedCompositeFieldContainer[Manifest]
    size: ManifestSize
    step_artifact_ids: _containers.RepeatedScalarFieldContainer[str]
    raw_port: int
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., artifact_id: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[Manifest, _Mapping]]] = ..., size: _Optional[_Union[ManifestSize, _Mapping]] = ..., step_artifact_ids: _Optional[_Iterable[str]] = ..., raw_port: _Optional[int] = ...) -> None: ...

class ManifestSize(_message.Message):
    __slots__ = ("num_tensors", "num_chunks", "num_files", "message_bytes")
    NUM_TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FILES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_tensors: int
    num_chunks: int
    num_files: int
    message_bytes: int
    def __init__(self, num_tensors: _Optional[int] = ..., num_chunks: _Optional[int] = ..., num_files: _Optional[int] = ..., message_bytes: _Optional[int] = ...) -> None: ...

class ManifestPart(_message.Message):
    __slots__ = ("tensors", "chunks", "files")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkEntry]
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[ChunkEntry, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ...) -> None: ...

class FetchManifestRequest(_message.Message):
    __slots__ = ("artifact_id",)
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    def __init__(self, artifact_id: _Optional[str] = ...) -> None: ...

class FetchManifestResponse(_message.Message):
    __slots__ = ("header", "part", "size")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    header: Manifest
    part: ManifestPart
    size: ManifestSize
    def __init__(self, header: _Optional[_Union[Manifest, _Mapping]] = ..., part: _Optional[_Union[ManifestPart, _Mapping]] = ..., size: _Optional[_Union[ManifestSize, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("artifact_id", "ranges", "chunk_bytes")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    ranges: _containers.RepeatedCompositeFieldContainer[ByteRange]
    chunk_bytes: int
    def __init__(self, artifact_id: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class ByteRange(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class OpenGroupRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "epoch", "store_address", "backend", "num_senders", "engine_ids", "without", "deadline_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_SENDERS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    epoch: int
    store_address: str
    backend: str
    num_senders: int
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    without: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., store_address: _Optional[str] = ..., backend: _Optional[str] = ..., num_senders: _Optional[int] = ..., engine_ids: _Optional[_Iterable[str]] = ..., without: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class OpenGroupResponse(_message.Message):
    __slots__ = ("generation", "members")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    members: _containers.RepeatedCompositeFieldContainer[GroupMember]
    def __init__(self, generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[GroupMember, _Mapping]]] = ...) -> None: ...

class GroupMember(_message.Message):
    __slots__ = ("engine_id", "first_receiver", "num_ranks")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_RECEIVER_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    first_receiver: int
    num_ranks: int
    def __init__(self, engine_id: _Optional[str] = ..., first_receiver: _Optional[int] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class SleepEnginesRequest(_message.Message):
    __slots__ = ("engine_pool", "deadline_s")
    ENGINE_POOL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    engine_pool: str
    deadline_s: float
    def __init__(self, engine_pool: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class SleepEnginesResponse(_message.Message):
    __slots__ = ("asleep", "awake", "seconds")
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    AWAKE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    asleep: int
    awake: int
    seconds: float
    def __init__(self, asleep: _Optional[int] = ..., awake: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ("engine_pool", "page_size", "page_token", "contract_version", "capabilities")
    ENGINE_POOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    engine_pool: str
    page_size: int
    page_token: str
    contract_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_pool: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., contract_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "epoch", "next_page_token", "run_epochs", "contract_version", "capabilities")
    class RunEpochsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUN_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    epoch: int
    next_page_token: str
    run_epochs: _containers.ScalarMap[str, int]
    contract_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ..., epoch: _Optional[int] = ..., next_page_token: _Optional[str] = ..., run_epochs: _Optional[_Mapping[str, int]] = ..., contract_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("engine_id", "url", "engine_pool", "state", "serving_version", "routable", "last_seen_s", "last_fault", "transports", "collective_ranks", "collective_backend", "group_generation", "host", "sleeping", "can_sleep", "layout_signature", "served", "last_seen_time", "max_adapters", "max_adapter_rank", "capabilities")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SERVING_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTABLE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_S_FIELD_NUMBER: _ClassVar[int]
    LAST_FAULT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_BACKEND_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLEEPING_FIELD_NUMBER: _ClassVar[int]
    CAN_SLEEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_TIME_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    url: str
    engine_pool: str
    state: AgentState
    serving_version: int
    routable: bool
    last_seen_s: float
    last_fault: AgentFault
    transports: _containers.RepeatedScalarFieldContainer[Transport]
    collective_ranks: int
    collective_backend: str
    group_generation: int
    host: str
    sleeping: bool
    can_sleep: bool
    layout_signature: bytes
    served: _containers.RepeatedCompositeFieldContainer[_runs_pb2.ServedVersion]
    last_seen_time: _timestamp_pb2.Timestamp
    max_adapters: int
    max_adapter_rank: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_id: _Optional[str] = ..., url: _Optional[str] = ..., engine_pool: _Optional[str] = ..., state: _Optional[_Union[AgentState, str]] = ..., serving_version: _Optional[int] = ..., routable: bool = ..., last_seen_s: _Optional[float] = ..., last_fault: _Optional[_Union[AgentFault, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, str]]] = ..., collective_ranks: _Optional[int] = ..., collective_backend: _Optional[str] = ..., group_generation: _Optional[int] = ..., host: _Optional[str] = ..., sleeping: bool = ..., can_sleep: bool = ..., layout_signature: _Optional[bytes] = ..., served: _Optional[_Iterable[_Union[_runs_pb2.ServedVersion, _Mapping]]] = ..., last_seen_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., max_adapters: _Optional[int] = ..., max_adapter_rank: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("request_id", "run_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightSyncDrainRequest(_message.Message):
    __slots__ = ("request_id", "deadline_s", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    deadline_s: float
    message: str
    def __init__(self, request_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., message: _Optional[str] = ...) -> None: ...

class WeightSyncDrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCompiledRequest(_message.Message):
    __slots__ = ("key", "digest_only")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ONLY_FIELD_NUMBER: _ClassVar[int]
    key: str
    digest_only: bool
    def __init__(self, key: _Optional[str] = ..., digest_only: bool = ...) -> None: ...

class GetCompiledResponse(_message.Message):
    __slots__ = ("digest", "archive")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    archive: bytes
    def __init__(self, digest: _Optional[bytes] = ..., archive: _Optional[bytes] = ...) -> None: ...

class KeepCompiledRequest(_message.Message):
    __slots__ = ("key", "digest", "archive")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    key: str
    digest: bytes
    archive: bytes
    def __init__(self, key: _Optional[str] = ..., digest: _Optional[bytes] = ..., archive: _Optional[bytes] = ...) -> None: ...

class KeepCompiledResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
