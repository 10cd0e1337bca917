"""Configuration sections that the RL trainer and the SFT trainer share."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import LogConfig, Seed
from meshrl.core.config.typed import TypedConfig
from meshrl.core.private_folders import ReadableBy
from meshrl.training.bench.config import BenchConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.deployment import DeploymentConfig


class OptimConfig(TypedConfig):
    """The optimizer."""

    section: ClassVar = "optim"

    of_types: ClassVar = {
        **dict.fromkeys(("betas1", "betas2", "eps"), ("adamw", "muon")),
        "momentum": ("muon", "sgd"),
    }

    type: Literal["adamw", "muon", "sgd"] = "adamw"
    """Optimizer; muon is for matrices, and everything else then has adamw."""

    lr: float = Field(default=1e-6, ge=0.0)
    """Peak learning rate; 0 never changes the weights, to measure the run's noise (`meshrl doctor --drift`)."""

    weight_decay: float = Field(default=0.01, ge=0.0)
    """Weight decay, decoupled but for sgd; vectors (norms, biases) are exempt."""

    betas1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """adamw, muon: decay of the first moment."""

    betas2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """adamw, muon: decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0.0)
    """adamw, muon: term that keeps the update finite."""

    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """muon, sgd: decay of the momentum."""

    max_norm: float | None = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this global norm; None means never."""


class SchedulerConfig(TypedConfig):
    """The learning rate over the steps: warm-up, plateau, decay."""

    section: ClassVar = "scheduler"

    of_types: ClassVar = dict.fromkeys(("decay_steps", "min_lr"), ("linear", "cosine", "wsd"))

    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the decay; constant has none, wsd stays at the peak and then falls by one minus a square root."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly to its peak; step 1 already has a rate above zero."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Length of the decay, which ends at max_steps; None: everything after the warm-up, or for wsd a tenth of it.
    Without max_steps it starts right after the warm-up."""

    min_lr: float = Field(default=0.0, ge=0.0)
    """Rate at the end of the decay and after it."""

    def check_horizon(self, max_steps: int | None) -> None:
        """Raises ValueError when the decay has no end to aim at."""
        if self.type != "constant" and self.decay_steps is None and max_steps is None:
            raise ValueError(
                f"scheduler.type {self.type!r} needs scheduler.decay_steps or max_steps; set one, or use 'constant'"
            )


class SnapshotConfig(BaseConfig):
    """The Hugging Face folders that are written along with checkpoints."""

    save_adapter_separately: bool = False
    """With model.lora, also write the adapters on their own, into lora_adapters/ in the folder of merged weights."""


class CheckpointConfig(BaseConfig):
    """When to write checkpoints; the section is off unless it is given."""

    interval: int | None = Field(default=None, ge=1)
    """Save every so many steps; None saves at the end only."""

    save_async: bool = False
    """Copy the state to the host's memory and write it in the background while training goes on."""

    weights: SnapshotConfig = SnapshotConfig()
    """The Hugging Face folders."""

    keep_last: int | None = Field(default=None, ge=1)
    """Keep only the newest so many checkpoints; None keeps all."""

    keep_interval: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this step survive keep_last; None spares none."""

    weights_only: bool = False
    """Save only the Hugging Face weights, without optimizer and progress; such a checkpoint cannot be resumed."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Continue from the checkpoint of this step; -1 takes the newest, None starts afresh."""

    @model_validator(mode="after")
    def _resumable(self) -> Self:
        if self.resume_step == 0:
            raise ValueError(
                "ckpt.resume_step must be a saved step (1 or more) or -1 for the newest; leave it out to start afresh"
            )
        return self


class TrainingConfig(BaseConfig):
    """The common keys of programs that train."""

    model: TrainerModelConfig = TrainerModelConfig()
    """The model to train. Master weights are float32; dtype is what it computes in and publishes."""

    optim: OptimConfig = OptimConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning rate over the steps."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints; off unless given."""

    deployment: DeploymentConfig = DeploymentConfig()
    """The processes that the trainer runs as."""

    bench: BenchConfig | None = None
    """Measure steps on fake data and end; off unless given."""

    max_steps: int | None = Field(default=None, ge=1)
    """Steps to train; batches beyond are refused. None means no end."""

    max_logits_mib: int | None = Field(default=None, ge=1)
    """Memory for logits, in MiB. If gradients of a row's logits fit on a GPU, they are kept; otherwise logits are
    computed in pieces, and again in backward. None chooses by the device."""

    torch_threads: int | None = Field(default=None, ge=1)
    """Threads for torch kernels; None means torch's own choice."""

    seed: Seed = 0
    """Seed of everything random in training."""

    output_dir: Path = Path("outputs")
    """Folder for logs, traces, checkpoints, weights and broadcasts."""

    readable_by: ReadableBy = "owner"
    """Who may read what this program writes: its own user alone, also the group of the files, or everyone on the
    machine. Credentials stay for the owner."""

    log: LogConfig = LogConfig()
    """Logging."""

    @model_validator(mode="after")
    def _horizon(self) -> Self:
        self.scheduler.check_horizon(self.max_steps)
        return self

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        self.optim.refuse_foreign()
        self.scheduler.refuse_foreign()
        ckpt = self.ckpt
        if ckpt is None:
            return self
        if ckpt.save_async and ckpt.interval is None:
            raise ValueError(
                "ckpt.save_async is for checkpoints between steps, and without ckpt.interval one is saved at the end"
                " alone; set ckpt.interval, or leave ckpt.save_async out"
            )
        if ckpt.weights.save_adapter_separately and self.model.lora is None:
            raise ValueError(
                "ckpt.weights.save_adapter_separately needs model.lora: without it there is no adapter; set model.lora,"
                " or leave it out"
            )
        return self
