"""Sections of `rl` that differ from those of the programs themselves."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import LOCAL, Address, AddressesOrNone, LogConfig, LogLevel, ModelConfig
from meshrl.core.slurm.config import DeploymentType
from meshrl.orchestrator.config import NewRunConfig, OrchestratorConfig
from meshrl.rollout.config import ClientConfig, RolloutConfig
from meshrl.training.parallel.deployment import DeploymentConfig
from meshrl.weights.config import WeightsConfig


class OrchestratorLogConfig(LogConfig):
    """Logging of the orchestrator, and of verifiers."""

    vf_level: LogLevel | None = None
    """Log level of the verifiers package; the same as rollout.vf_level."""


class RunningServicesConfig(BaseConfig):
    """Addresses of services that run already, which rl then uses and does not start."""

    rollout: AddressesOrNone | None = None
    """host:port of a RolloutService, or a list of them. None starts the rollout program. `local` in the list starts it
    beside the others, for environments with `local = true`. [] starts none: workers dial in (orchestrator.exchange)."""

    trainer: Address | None = None
    """host:port of a TrainerService. None starts the trainer."""

    weights: Address | None = None
    """host:port of a weight hub. None starts the hub."""

    def given(self) -> dict[str, list[str]]:
        rollout = [address for address in self.rollout or () if address != LOCAL]
        given = {"rollout": rollout, "trainer": self.trainer, "weights": self.weights}
        return {name: [one] if isinstance(one, str) else one for name, one in given.items() if one}

    def replaced(self) -> set[str]:
        none = {"rollout"} if self.rollout == [] else set()
        return (set(self.given()) | none) - ({"rollout"} if LOCAL in (self.rollout or ()) else set())

    def rollout_addresses(self, local: str) -> list[str]:
        """`local` is the address of the program that rl starts."""
        named = [LOCAL] if self.rollout is None else self.rollout
        return [local if address == LOCAL else address for address in named]


class OrchestratorSection(OrchestratorConfig):
    """The orchestrator, with keys of the rollout program at their older place."""

    services: RunningServicesConfig = RunningServicesConfig()  # type: ignore[assignment]  # rl knows the other addresses
    """Services that run already, and are left running at the end."""

    log: OrchestratorLogConfig = OrchestratorLogConfig()
    """Logging."""

    model: ModelConfig | None = None
    """The same as rollout.model."""

    client: ClientConfig | None = None
    """Inference engines that run already; the same as rollout.client."""

    @property
    def environments_elsewhere(self) -> set[str]:
        evals = self.eval.env if self.eval is not None else []
        return {entry.resolved_name for entry in (*self.train.env, *evals) if not entry.local}

    @model_validator(mode="after")
    def _hosted(self) -> Self:
        elsewhere = self.environments_elsewhere
        if elsewhere and "rollout" not in self.services.given():
            raise ValueError(
                f"orchestrator.train.env: {', '.join(sorted(elsewhere))} has local = false, but"
                " orchestrator.services.rollout lists no service that could host it; add the address, as in"
                f" {LOCAL},HOST:PORT, or leave local out"
            )
        names = {entry.resolved_name for entry in self.train.env}
        if elsewhere and "rollout" not in self.services.replaced() and names <= elsewhere:
            raise ValueError(
                f"orchestrator.services.rollout has {LOCAL!r}, but every training environment has local = false, so"
                f" there is nothing to train on for the rollout program that rl starts; leave {LOCAL!r} out"
            )
        return self


class RunSection(OrchestratorConfig):
    """The orchestrator of a run with an adapter of its own."""

    run_id: str = Field(min_length=1, pattern=r"^[^/\\]+$")
    """Name of the run, whose folder is run_NAME in output_dir."""

    run: NewRunConfig = NewRunConfig()
    """What differs from the trainer's section."""

    @model_validator(mode="after")
    def _in_the_mesh(self) -> Self:
        for key in ("services", "mesh", "session"):
            if key in self.model_fields_set:
                raise ValueError(f"runs: {key} of run {self.run_id!r} is that of its mesh; leave it out")
        return self


class RolloutSection(RolloutConfig):
    """The rollout program, with the orchestrator's environments."""

    @model_validator(mode="after")
    def _environments(self) -> Self:
        if not self.env:
            raise ValueError(
                "orchestrator.train.env: needs at least one environment, got none, so rollout has nothing to host; add"
                " [[orchestrator.train.env]] with id = '<taskset>', or --orchestrator.train.env.0.id <taskset>; in a"
                " mesh that waits for runs to join it, name them in [[rollout.env]]"
            )
        return self

    @model_validator(mode="after")
    def _engines(self) -> Self:
        return self  # rl names the hub, which knows the engines


class WeightsSection(WeightsConfig):
    """The weight hub, with a key of the trainer."""

    transport: Literal["auto", "filesystem", "nccl", "stream"] | None = None
    """How versions travel; the same as trainer.weight_broadcast.type."""


class RunDeploymentConfig(DeploymentConfig):
    """The GPUs of a run, on this machine or the nodes of a job."""

    num_infer_gpus: int | None = Field(default=None, ge=1)
    """GPUs for inference: the first visible ones; the trainer takes the next. None is as many as the engines need.
    inference_gpu_ids and trainer_gpu_ids choose them by place."""

    type: DeploymentType = "single_node"
    """multi_node: in a SLURM job, the trainer on the first num_train_nodes nodes, engines on the next num_infer_nodes,
    other programs on the first."""

    num_train_nodes: int = Field(default=1, ge=1)
    """multi_node: nodes of the trainer."""

    num_infer_nodes: int = Field(default=1, ge=1)
    """multi_node: nodes of inference."""

    gpus_per_node: int = Field(default=8, ge=0)
    """In a SLURM job: GPUs of each node, all used by multi_node; nodes without have one training process or engine."""

    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    """multi_node: nodes that hold one copy of the trainer's model; sets trainer.model.dp_replicate."""

    insecure: bool = False
    """multi_node: make no certificates. Anyone on the nodes' network may then call the programs."""

    @property
    def nodes(self) -> int:
        return self.num_train_nodes + self.num_infer_nodes if self.type == "multi_node" else 1

    @model_validator(mode="after")
    def _whole_job(self) -> Self:
        if self.type == "single_node":
            for key in ("num_train_nodes", "num_infer_nodes"):
                if getattr(self, key) > 1:
                    raise ValueError(
                        f"deployment.{key} is {getattr(self, key)}, but deployment.type is 'single_node'; set it to"
                        " 'multi_node'"
                    )
            return self
        if self.nodes_per_fsdp_group is not None and self.num_train_nodes % self.nodes_per_fsdp_group:
            raise ValueError(
                f"deployment.nodes_per_fsdp_group is {self.nodes_per_fsdp_group}, which does not divide"
                f" deployment.num_train_nodes ({self.num_train_nodes}); use a divisor"
            )
        if self.num_infer_gpus is not None:
            raise ValueError(
                "deployment.num_infer_gpus is for one node; with deployment.type 'multi_node' engines have"
                " gpus_per_node GPUs on each of num_infer_nodes nodes, so leave it out"
            )
        return self
