"""How one run is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from meshrl.core.config import BaseConfig
from meshrl.trainer.loss_config import LossConfig
from meshrl.training.config import CheckpointConfig, OptimConfig, SchedulerConfig
from meshrl.training.model_config import LoraConfig
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import (
    AdapterSpec,
    CheckpointPolicy,
    LossSpec,
    OptimizerSpec,
    RunDrive,
    RunSpec,
    ScheduleSpec,
    StartPoint,
)

_OPTIMIZER = {
    "type": "type", "learning_rate": "lr", "beta1": "betas1", "beta2": "betas2", "eps": "eps",
    "weight_decay": "weight_decay", "momentum": "momentum", "max_grad_norm": "max_norm",
}  # fmt: skip
_SCHEDULE = {
    "type": "type", "warmup_steps": "warmup_steps", "decay_steps": "decay_steps", "min_learning_rate": "min_lr",
}  # fmt: skip

_CHECKPOINTS = {name: name for name in ("interval", "keep_last", "keep_interval")}


class StartFrom(BaseConfig):
    """A checkpoint of another run."""

    run_id: str
    step: int
    with_optimizer: bool
    """Whether optimizer, schedule and step go on; else the weights start at step 0."""

    checkpoints: str
    """The folder of the run's checkpoints."""


class RunSettings(BaseConfig):
    lora: LoraConfig | None = None
    """Its adapter; None trains every parameter of the model."""

    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    ckpt: CheckpointConfig | None = None
    seed: int = 0
    adapter_seed: int = 0
    """Seed of the adapter's first values."""

    share: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Share of the trainer's time, relative to that of other runs with work."""

    max_queued_batches: int = Field(default=2, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    labels: dict[str, str] = Field(default_factory=dict)
    start_from: StartFrom | None = None
    """Where it starts without a checkpoint of its own; None is the base model."""

    folder: str = ""
    """Folder of output_dir with its checkpoints, weights and epoch; empty: runs/<run_id>."""

    @classmethod
    def from_spec(
        cls, spec: RunSpec | None, own: RunSettings, start: tuple[StartFrom, LoraConfig | None] | None = None
    ) -> RunSettings:
        """Those of a new run, with `own` for what a spec leaves out. `start` is the spec's checkpoint, and the adapter
        of that run if it is here. Raises MeshError INVALID_REQUEST and RUN_LIMIT_REACHED."""
        spec = spec or RunSpec()
        if own.lora is None:
            raise MeshError(
                Reason.RUN_LIMIT_REACHED,
                "this trainer trains every parameter of its model, which only its own run can; set trainer.model.lora"
                " and trainer.max_concurrent_runs to train several runs",
            )
        if spec.drive is RunDrive.COMMANDS:
            problem = FieldViolation("spec.drive", "must be left out: this trainer trains batches only")
            raise invalid([problem], "the new run")
        values = own.model_dump(exclude={"ckpt": {"resume_step"}})
        if start is not None:
            values["start_from"], adapter = start
            values["lora"] = values["lora"] if adapter is None else adapter.model_dump()
        if spec.adapter is not None:
            values["lora"] |= {
                "rank": spec.adapter.rank,
                "alpha": spec.adapter.alpha,
                "dropout": spec.adapter.dropout,
                "target_modules": list(spec.adapter.target_modules) or own.lora.target_modules,
            }
        values["seed"] = own.seed if spec.seed is None else spec.seed
        values["adapter_seed"] = values["seed"]
        if spec.adapter is not None and spec.adapter.seed is not None:
            values["adapter_seed"] = spec.adapter.seed
        if spec.optimizer is not None:
            values["optim"] |= _given(spec.optimizer, _OPTIMIZER)
            if spec.optimizer.max_grad_norm == 0.0:
                values["optim"]["max_norm"] = None
        if spec.schedule is not None:
            values["scheduler"] |= _given(spec.schedule, _SCHEDULE)
            if spec.schedule.max_steps is not None:
                values["max_steps"] = spec.schedule.max_steps
        if spec.loss is not None:
            values["loss"] = {"type": spec.loss.name, **spec.loss.constants}
        if spec.checkpoints is not None:
            given = _given(spec.checkpoints, _CHECKPOINTS)
            values["ckpt"] = (values["ckpt"] or {}) | {name: value or None for name, value in given.items()}
        for name in ("share", "max_queued_batches"):
            if getattr(spec, name) is not None:
                values[name] = getattr(spec, name)
        values["labels"] = dict(spec.labels)
        try:
            made = cls.model_validate(values)
            made.scheduler.check_horizon(made.max_steps)
        except ValidationError as error:
            raise invalid(
                [FieldViolation("spec." + ".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()],
                "the new run",
            ) from error
        except ValueError as error:
            raise invalid([FieldViolation("spec.schedule", str(error))], "the new run") from error
        return made

    @property
    def spec(self) -> RunSpec:
        optim, schedule, lora, ckpt = self.optim, self.scheduler, self.lora, self.ckpt
        return RunSpec(
            adapter=None
            if lora is None
            else AdapterSpec(
                rank=lora.rank,
                alpha=lora.alpha,
                target_modules=tuple(lora.target_modules),
                dropout=lora.dropout,
                seed=self.adapter_seed,
            ),
            optimizer=OptimizerSpec(
                max_grad_norm=optim.max_norm or 0.0,
                **{
                    name: getattr(optim, key)
                    for name, key in _OPTIMIZER.items()
                    if name != "max_grad_norm" and optim.type in optim.of_types.get(key, [optim.type])
                },
            ),
            schedule=ScheduleSpec(
                max_steps=self.max_steps, **{name: getattr(schedule, key) for name, key in _SCHEDULE.items()}
            ),
            loss=LossSpec(
                name=self.loss.type,
                constants={name: value for name, value in self.loss.constants.items() if value is not None},
            ),
            seed=self.seed,
            share=self.share,
            max_queued_batches=self.max_queued_batches,
            start_from=None
            if (start := self.start_from) is None
            else StartPoint(run_id=start.run_id, step=start.step, with_optimizer=start.with_optimizer),
            checkpoints=None
            if ckpt is None
            else CheckpointPolicy(**{name: getattr(ckpt, name) for name in _CHECKPOINTS}),
            labels=self.labels,
        )


def _given(spec: OptimizerSpec | ScheduleSpec | CheckpointPolicy, keys: Mapping[str, str]) -> dict[str, Any]:
    found = {key: getattr(spec, name) for name, key in keys.items()}
    return {key: value for key, value in found.items() if value is not None and value != ""}
