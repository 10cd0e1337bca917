"""Runs: how they are trained, their state, and their versions at engines."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """A layer of `target_modules` adds alpha / rank * B(A(x)); `seed` is of A's first values."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    dropout: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """None takes the trainer's own setting."""

    type: str
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    max_grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """None takes the trainer's own setting."""

    type: str
    warmup_steps: int | None = None
    decay_steps: int | None = None
    min_learning_rate: float | None = None
    max_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    name: str
    constants: Mapping[str, float] = field(default_factory=dict)


class RunDrive(enum.Enum):
    BATCHES = "batches"
    COMMANDS = "commands"


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """A checkpoint of `run_id`, "" for the new run's own name; `step` None is the newest."""

    run_id: str = ""
    step: int | None = None
    with_optimizer: bool = False

    @classmethod
    def read(cls, text: str, *, with_optimizer: bool = False) -> StartPoint:
        """Of RUN or RUN@STEP. Raises ValueError."""
        run_id, at, step = text.partition("@")
        if not run_id or (at and not step.isdecimal()):
            raise ValueError(f"a start must be RUN or RUN@STEP, such as letters@40, got {text!r}")
        return cls(run_id=run_id, step=int(step) if at else None, with_optimizer=with_optimizer)


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """In steps. None takes the trainer's own setting."""

    interval: int | None = None
    keep_last: int | None = None
    keep_interval: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """None takes the trainer's own setting. Without an adapter it trains every parameter."""

    adapter: AdapterSpec | None = None
    optimizer: OptimizerSpec | None = None
    schedule: ScheduleSpec | None = None
    loss: LossSpec | None = None
    seed: int | None = None
    share: float | None = None
    max_queued_batches: int | None = None
    drive: RunDrive = RunDrive.BATCHES
    start_from: StartPoint | None = None
    checkpoints: CheckpointPolicy | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class RunPhase(enum.Enum):
    CREATING = "creating"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETING = "deleting"


@dataclass(frozen=True, kw_only=True)
class Suspension:
    """`reason` of the catalogue by the trainer, else empty and `by` is ROLE/NAME."""

    reason: str = ""
    message: str = ""
    by: str = ""

    def __str__(self) -> str:
        return self.message or self.reason or f"by {self.by}"


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """`epoch` grows with each restart of the run's trainer. `durable_step` is the last in a checkpoint on its disk,
    `oldest_revision` the smallest that a watch may begin after. Times are in seconds of the epoch."""

    run_id: str
    step: int
    version: int
    epoch: int
    revision: int
    durable_step: int = 0
    phase: RunPhase = RunPhase.ACTIVE
    suspension: Suspension | None = None
    spec: RunSpec | None = None
    create_time: float | None = None
    update_time: float | None = None
    tokens: int = 0
    queued_batches: int = 0
    used_share: float | None = None
    oldest_revision: int = 0
    adapter_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    """`newest` ones get the run's requests without a version."""

    run_id: str
    version: int
    artifact_id: str = ""
    root: bytes = b""
    in_flight: int = 0
    newest: bool = False
    epoch: int = 0


class CheckpointState(enum.Enum):
    SAVING = "saving"
    DURABLE = "durable"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`name` and `request_id` are its request's; times are in seconds of the epoch."""

    run_id: str
    step: int
    state: CheckpointState
    path: str = ""
    weights_only: bool = False
    name: str = ""
    request_id: str = ""
    create_time: float | None = None
    end_time: float | None = None
    num_bytes: int | None = None
    reason: str = ""
    message: str = ""
