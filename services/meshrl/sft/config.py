"""Configuration of the `sft` program; read by its main."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import LogConfig, WandbConfig
from meshrl.core.slurm.config import DeploymentType, SlurmConfig
from meshrl.training.bench.config import BenchConfig
from meshrl.training.config import CheckpointConfig, OptimConfig, SchedulerConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.deployment import DeploymentConfig


class DataConfig(BaseConfig):
    """Conversations to train on."""

    name: str = Field(default="train.jsonl", min_length=1)
    """A .jsonl or .parquet file, or the name of a dataset on the Hugging Face hub.

    Rows have a messages column, or prompt and completion; tools (or tool_defs) and chat_template_kwargs are optional.
    """

    subset: str | None = None
    """Subset of a hub dataset."""

    split: str = "train"
    """Split of a hub dataset."""

    batch_size: int = Field(default=8192, ge=2)
    """Tokens per step, packed: whole conversations are taken until one more would not fit."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest packed row in tokens; a longer conversation is cut at its end."""

    seed: int = 0
    """Seed of the order, which is drawn anew each epoch."""


class LossMaskConfig(BaseConfig):
    """Whose messages are learned. In prompt/completion data only those of the completion."""

    system: bool = False
    """Learn system messages."""

    user: bool = False
    """Learn user messages."""

    assistant: bool = True
    """Learn assistant messages."""

    tool: bool = False
    """Learn tool messages."""

    def roles(self) -> frozenset[str]:
        """The roles that are learned."""
        return frozenset(role for role in ("system", "user", "assistant", "tool") if getattr(self, role))


class ValConfig(BaseConfig):
    """Validation on data that is not trained on."""

    interval: int = Field(default=50, ge=1)
    """Validate every so many steps, and after the last one."""

    data: DataConfig = DataConfig(name="val.jsonl")
    """What to validate on; all of it each time."""


class SFTDeploymentConfig(DeploymentConfig):
    """The processes that train together, on this machine or on the nodes of a job."""

    type: DeploymentType = "single_node"
    """multi_node trains on num_train_nodes nodes of a SLURM job."""

    num_train_nodes: int = Field(default=1, ge=1)
    """multi_node: how many nodes."""

    gpus_per_node: int = Field(default=8, ge=0)
    """In a SLURM job: GPUs of each node, with a training process each in multi_node; 0 for nodes without, which have
    one process."""

    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    """multi_node: nodes that hold one copy of the model between them; sets model.dp_replicate. None leaves that key as
    it is."""

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return self.num_train_nodes if self.type == "multi_node" else 1

    @model_validator(mode="after")
    def _nodes_fit(self) -> Self:
        if self.type == "single_node" and self.num_train_nodes > 1:
            raise ValueError(
                f"deployment.num_train_nodes is {self.num_train_nodes}, but deployment.type is 'single_node'; set it to"
                " 'multi_node'"
            )
        if self.nodes_per_fsdp_group is not None and self.num_train_nodes % self.nodes_per_fsdp_group:
            raise ValueError(
                f"deployment.nodes_per_fsdp_group is {self.nodes_per_fsdp_group}, which does not divide"
                f" deployment.num_train_nodes ({self.num_train_nodes}); use a divisor"
            )
        return self


class SFTConfig(BaseConfig):
    """Fine-tunes a model on conversations."""

    sections_in_rl: ClassVar[tuple[str, ...]] = ("sft",)

    model: TrainerModelConfig = TrainerModelConfig()
    """The model to start from. Master weights are float32; dtype is what it computes in."""

    data: DataConfig = DataConfig()
    """What to train on."""

    loss_mask: LossMaskConfig = LossMaskConfig()
    """Whose messages are learned."""

    val: ValConfig | None = None
    """Validation; None means none."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The optimizer."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning rate over the steps."""

    deployment: SFTDeploymentConfig = SFTDeploymentConfig()
    """The processes that train together."""

    slurm: SlurmConfig | None = None
    """Submit the program as a SLURM job; None starts it here."""

    bench: BenchConfig | None = None
    """Measure steps on fake data and end; off unless given."""

    max_steps: int = Field(default=100, ge=1)
    """Steps to train."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints to resume from; without it only the weights after the last step are written."""

    max_logits_mib: int | None = Field(default=None, ge=1)
    """Largest block of logits kept at once, in MiB; more are made in pieces and again in backward. None means what
    suits the device."""

    torch_threads: int | None = Field(default=None, ge=1)
    """Threads for torch kernels; None means torch's own choice."""

    seed: int = 0
    """Seed of everything random in training but the order of the data."""

    output_dir: Path = Path("outputs")
    """Folder for weights, checkpoints, metrics and logs."""

    log: LogConfig = LogConfig()
    """Logging."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None means off."""

    @model_validator(mode="after")
    def _horizon(self) -> Self:
        self.scheduler.check_horizon(self.max_steps)
        return self

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.loss_mask.roles():
            raise ValueError("loss_mask leaves no role to learn from; switch one on, such as --loss-mask.assistant")
        return self
