"""Sections of `rl` that differ from those of the programs themselves."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import Addresses, LogConfig, LogLevel, ModelConfig, WandbConfig
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.rollout.config import ClientConfig, RolloutConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.training.parallel.deployment import DeploymentConfig
from meshrl.weights.config import WeightsConfig


class OrchestratorLogConfig(LogConfig):
    """What the orchestrator logs, and the verifiers package beside the environments."""

    vf_level: LogLevel | None = None
    """Log level of the verifiers package; the same as rollout.vf_level."""


class RunningServicesConfig(BaseConfig):
    """Addresses of services that run already, which rl then uses and does not start."""

    rollout: Addresses | None = None
    """host:port of a RolloutService that runs already, or a list of them; None starts the rollout program."""

    trainer: str | None = Field(default=None, min_length=1)
    """host:port of a TrainerService that runs already; None starts the trainer."""

    weights: str | None = Field(default=None, min_length=1)
    """host:port of a weight hub that runs already; None starts the hub."""

    def given(self) -> dict[str, list[str]]:
        """Addresses by the names of the programs that they stand for."""
        given = {"rollout": self.rollout, "trainer": self.trainer, "weights": self.weights}
        return {name: [one] if isinstance(one, str) else one for name, one in given.items() if one is not None}


class OrchestratorSection(OrchestratorConfig):
    """The orchestrator, with keys that belong to the rollout program now and are taken at their older place."""

    services: RunningServicesConfig = RunningServicesConfig()  # type: ignore[assignment]  # rl knows the other addresses
    """Services that run already. rl uses them, starts none in their place and leaves them running at the end."""

    log: OrchestratorLogConfig = OrchestratorLogConfig()
    """Logging."""

    model: ModelConfig | None = None
    """The policy that rollouts are sampled from; the same as rollout.model."""

    client: ClientConfig | None = None
    """Inference engines that already run; the same as rollout.client."""


class RolloutSection(RolloutConfig):
    """The rollout program, whose environments follow from those of the orchestrator."""

    @model_validator(mode="after")
    def _environments(self) -> Self:
        if not self.env:
            raise ValueError(
                "orchestrator.train.env: needs at least one environment, got none, so rollout has nothing to host; add"
                " [[orchestrator.train.env]] with id = '<taskset>', or --orchestrator.train.env.0.id <taskset>"
            )
        return self

    @model_validator(mode="after")
    def _engines(self) -> Self:
        return self  # rl names the hub, which knows the engines


class TrainerSection(TrainerConfig):
    """The trainer, with a key that other launchers know and that has no effect here."""

    wandb: WandbConfig | None = None
    """Taken but not used: the orchestrator logs the trainer's metrics into the run's one W&B run; set wandb instead."""


class WeightsSection(WeightsConfig):
    """The weight hub, with a key of the trainer that is about weights as well."""

    transport: Literal["auto", "filesystem", "nccl", "stream"] | None = None
    """How versions travel; the same as trainer.weight_broadcast.type."""


class RunDeploymentConfig(DeploymentConfig):
    """How a run is spread over the GPUs of this machine."""

    num_infer_gpus: int | None = Field(default=None, ge=1)
    """GPUs for inference: the first of those visible; the trainer takes the next ones. None means what num_engines and
    the sizes of an engine ask for. inference_gpu_ids and trainer_gpu_ids choose the GPUs themselves."""
