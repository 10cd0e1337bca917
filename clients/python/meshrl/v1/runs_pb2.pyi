from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunDrive(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_DRIVE_UNSPECIFIED: _ClassVar[RunDrive]
    RUN_DRIVE_BATCHES: _ClassVar[RunDrive]
    RUN_DRIVE_COMMANDS: _ClassVar[RunDrive]

class RunPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_PHASE_UNSPECIFIED: _ClassVar[RunPhase]
    RUN_PHASE_CREATING: _ClassVar[RunPhase]
    RUN_PHASE_ACTIVE: _ClassVar[RunPhase]
    RUN_PHASE_SUSPENDED: _ClassVar[RunPhase]
    RUN_PHASE_DELETING: _ClassVar[RunPhase]
RUN_DRIVE_UNSPECIFIED: RunDrive
RUN_DRIVE_BATCHES: RunDrive
RUN_DRIVE_COMMANDS: RunDrive
RUN_PHASE_UNSPECIFIED: RunPhase
RUN_PHASE_CREATING: RunPhase
RUN_PHASE_ACTIVE: RunPhase
RUN_PHASE_SUSPENDED: RunPhase
RUN_PHASE_DELETING: RunPhase

class RunSpec(_message.Message):
    __slots__ = ("adapter", "optimizer", "schedule", "loss", "seed", "share", "max_queued_batches", "drive", "start_from", "checkpoints", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    DRIVE_FIELD_NUMBER: _ClassVar[int]
    START_FROM_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterSpec
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    loss: LossSpec
    seed: int
    share: float
    max_queued_batches: int
    drive: RunDrive
    start_from: StartPoint
    checkpoints: CheckpointPolicy
    labels: _containers.ScalarMap[str, str]
    def __init__(self, adapter: _Optional[_Union[AdapterSpec, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., schedule: _Optional[_Union[ScheduleSpec, _Mapping]] = ..., loss: _Optional[_Union[LossSpec, _Mapping]] = ..., seed: _Optional[int] = ..., share: _Optional[float] = ..., max_queued_batches: _Optional[int] = ..., drive: _Optional[_Union[RunDrive, str]] = ..., start_from: _Optional[_Union[StartPoint, _Mapping]] = ..., checkpoints: _Optional[_Union[CheckpointPolicy, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AdapterSpec(_message.Message):
    __slots__ = ("rank", "alpha", "target_modules", "dropout", "seed")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    dropout: float
    seed: int
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ..., dropout: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("type", "learning_rate", "beta1", "beta2", "eps", "weight_decay", "momentum", "max_grad_norm")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    type: str
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    max_grad_norm: float
    def __init__(self, type: _Optional[str] = ..., learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., momentum: _Optional[float] = ..., max_grad_norm: _Optional[float] = ...) -> None: ...

class ScheduleSpec(_message.Message):
    __slots__ = ("type", "warmup_steps", "decay_steps", "min_learning_rate", "max_steps")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MIN_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    type: str
    warmup_steps: int
    decay_steps: int
    min_learning_rate: float
    max_steps: int
    def __init__(self, type: _Optional[str] = ..., warmup_steps: _Optional[int] = ..., decay_steps: _Optional[int] = ..., min_learning_rate: _Optional[float] = ..., max_steps: _Optional[int] = ...) -> None: ...

class LossSpec(_message.Message):
    __slots__ = ("name", "constants")
    class ConstantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    constants: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., constants: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StartPoint(_message.Message):
    __slots__ = ("run_id", "step", "with_optimizer")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WITH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    with_optimizer: bool
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., with_optimizer: bool = ...) -> None: ...

class CheckpointPolicy(_message.Message):
    __slots__ = ("interval", "keep_last", "keep_interval")
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    KEEP_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: int
    keep_last: int
    keep_interval: int
    def __init__(self, interval: _Optional[int] = ..., keep_last: _Optional[int] = ..., keep_interval: _Optional[int] = ...) -> None: ...

class Suspension(_message.Message):
    __slots__ = ("reason", "message", "by")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    by: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class ServedVersion(_message.Message):
    __slots__ = ("run_id", "version", "artifact_id", "root", "in_flight", "newest", "epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    artifact_id: str
    root: bytes
    in_flight: int
    newest: bool
    epoch: int
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., artifact_id: _Optional[str] = ..., root: _Optional[bytes] = ..., in_flight: _Optional[int] = ..., newest: bool = ..., epoch: _Optional[int] = ...) -> None: ...
