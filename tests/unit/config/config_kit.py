"""A configuration class with every kind of key, for tests of the loader."""

from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import EnvConfig, LogConfig, ModelConfig, ServerConfig, WandbConfig


class Loss(BaseConfig):
    """A loss."""

    type: Literal["default", "aipo"] = "default"
    """Which loss."""

    kl_tau: float = 0.5
    """Weight of the KL term."""

    delta: float = Field(default=4.0, gt=0.0)
    """Cut-off."""


class Ckpt(BaseConfig):
    """Checkpoints."""

    interval: int | None = None
    """Save every so many steps."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Step to resume from."""


class Sample(BaseConfig):
    """A program."""

    model: ModelConfig = ModelConfig()
    """The model."""

    server: ServerConfig = ServerConfig(port=50052)
    """Where to listen."""

    loss: Loss = Loss()
    """The loss."""

    ckpt: Ckpt | None = None
    """Checkpoints; None means off."""

    wandb: WandbConfig | None = None
    """Weights & Biases."""

    env: list[EnvConfig] = Field(default_factory=list)
    """Environments."""

    gpu_ids: list[int] | None = None
    """GPUs."""

    tags: list[str] = Field(default_factory=list)
    """Tags."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Free options."""

    group_size: int = Field(default=8, ge=1, validation_alias=AliasChoices("group_size", "rollouts_per_example"))
    """Rollouts per task."""

    max_steps: int | None = None
    """Steps."""

    max_norm: float | None = 1.0
    """Gradient norm."""

    level: int | Literal["auto"] = "auto"
    """A number, or auto."""

    bench: bool = False
    """Measure."""

    eval_base: bool = True
    """Evaluate the base model."""

    api_key: str | None = None
    """Token."""

    output_dir: Path = Path("outputs")
    """Folder."""

    log: LogConfig = LogConfig()
    """Logging."""
