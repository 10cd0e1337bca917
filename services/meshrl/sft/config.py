"""Configuration of the `sft` program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import ModelConfig, WandbConfig
from meshrl.core.config.typed import changed
from meshrl.core.slurm.config import DeploymentType, SlurmConfig
from meshrl.sft.data.config import DataConfig
from meshrl.training.config import CheckpointConfig, OptimConfig, TrainingConfig
from meshrl.training.parallel.deployment import DeploymentConfig


class LossMaskConfig(BaseConfig):
    """Whose messages are learned; of prompt and completion those of the completion alone."""

    system: bool = False
    """Learn system messages."""

    user: bool = False
    """Learn user messages."""

    assistant: bool = True
    """Learn assistant messages."""

    tool: bool = False
    """Learn tool messages."""

    def roles(self) -> frozenset[str]:
        return frozenset(role for role in ("system", "user", "assistant", "tool") if getattr(self, role))


FOR_TRAINING = (
    "probabilities",
    "stopping_strategy",
    "batch_size",
    "pack_function",
    "shuffle",
    "seed",
    "num_workers",
    "length",
)
"""Keys of [data] that have no effect in [val.data]."""


class ValConfig(BaseConfig):
    """Validation on data that is not trained on."""

    interval: int = Field(default=50, ge=1)
    """Validate every so many steps, and after the last one."""

    data: DataConfig = DataConfig(name="val.jsonl")
    """Validation data; all of it each time."""

    @model_validator(mode="after")
    def _conversations(self) -> Self:
        if self.data.type == "fake":
            raise ValueError("val.data.type 'fake' has nothing to validate on; leave [val] out, or name data")
        return self

    def doubt(self) -> str | None:
        unused = changed(self.data, FOR_TRAINING)
        if not unused:
            return None
        keys = ", ".join(f"val.data.{key}" for key in unused)
        return f"no effect of {keys}: each validation takes all of the data once, in its order"


class TokenizerConfig(BaseConfig):
    """The tokenizer and its chat template."""

    name: str | None = Field(default=None, min_length=1)
    """Tokenizer, by folder or hub name, saved with the weights. None takes the model's."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's own, saved with the weights: a file, a Jinja text, or one that comes
    with sft (qwen3, which keeps the thinking of earlier turns)."""


class SFTDeploymentConfig(DeploymentConfig):
    """The processes that train together."""

    type: DeploymentType = "single_node"
    """multi_node trains on num_train_nodes nodes of a SLURM job."""

    num_train_nodes: int = Field(default=1, ge=1)
    """multi_node: how many nodes."""

    gpus_per_node: int = Field(default=8, ge=0)
    """In a SLURM job: GPUs of each node, with a training process each in multi_node. 0: nodes without, with one
    process."""

    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    """multi_node: nodes that hold one copy of the model; sets model.dp_replicate. None leaves that key as it is."""

    @property
    def nodes(self) -> int:
        return self.num_train_nodes if self.type == "multi_node" else 1

    @model_validator(mode="after")
    def _nodes_fit(self) -> Self:
        if self.type == "single_node" and self.num_train_nodes > 1:
            raise ValueError(
                f"deployment.num_train_nodes is {self.num_train_nodes}, but deployment.type is 'single_node'; set it to"
                " 'multi_node'"
            )
        if self.type == "multi_node" and self.num_train_gpus > 1:
            raise ValueError(
                f"deployment.num_train_gpus is {self.num_train_gpus}, but it is for one node; deployment.gpus_per_node"
                " is what multi_node uses: leave it out"
            )
        if self.type == "single_node" and self.nodes_per_fsdp_group is not None:
            raise ValueError(
                "deployment.nodes_per_fsdp_group is for deployment.type 'multi_node', got 'single_node'; leave it out"
            )
        if self.nodes_per_fsdp_group is not None and self.num_train_nodes % self.nodes_per_fsdp_group:
            raise ValueError(
                f"deployment.nodes_per_fsdp_group is {self.nodes_per_fsdp_group}, which does not divide"
                f" deployment.num_train_nodes ({self.num_train_nodes}); use a divisor"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    model: ModelConfig
    tokenizer: TokenizerConfig
    renderer: Mapping[str, Any]
    learned_roles: frozenset[str]


class SFTConfig(TrainingConfig):
    """Fine-tunes a model on conversations."""

    data: DataConfig = DataConfig()
    """Training data."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer and its chat template."""

    renderer: dict[str, Any] = Field(default={})
    """Renderer of conversations in place of the chat template, by a name of the renderers package and its options, such
    as {name = "qwen3"}; "auto" takes that of model.name. Messages then need not render the same in every place."""

    loss_mask: LossMaskConfig = LossMaskConfig()
    """Whose messages are learned. A message with weight, loss_mask, trainable or train (0 or 1) decides for itself."""

    show_rows: int = Field(default=1, ge=0, le=64)
    """First rows to show before training, with the learned text between [[ and ]]."""

    val: ValConfig | None = None
    """Validation. None means none."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The optimizer."""

    deployment: SFTDeploymentConfig = SFTDeploymentConfig()
    """The processes that train together."""

    slurm: SlurmConfig | None = None
    """Submit the program as a SLURM job. None starts it here."""

    max_steps: int = Field(default=100, ge=1)
    """Steps to train."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints to resume from. None writes the weights after the last step alone."""

    clean_output_dir: bool = False
    """Empty output_dir first. Refused for a folder that does not look like a run's."""

    dry_run: bool = False
    """Check configuration and first rows, write the resolved file to output_dir/configs and end."""

    wandb: WandbConfig | None = None
    """Weights & Biases. None means off."""

    @property
    def validated(self) -> DataConfig | None:
        return None if self.val is None else self.val.data

    @property
    def text(self) -> TextSettings:
        return TextSettings(
            model=self.model,
            tokenizer=self.tokenizer,
            renderer=self.renderer,
            learned_roles=self.loss_mask.roles(),
        )

    @property
    def begins_with(self) -> list[Path]:
        """What a run reads: clean_output_dir must not delete it."""
        validation = [self.val.data.name] if self.val is not None else []
        return [Path(name) for name in (self.model.name, self.tokenizer.name, self.data.name, *validation) if name]

    def doubts(self) -> list[str]:
        """About settings that are probably not meant."""
        doubts = (self.data.doubt(), None if self.val is None else self.val.doubt())
        return [doubt for doubt in doubts if doubt is not None]

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.data.length != "fixed" and self.data.type != "fake" and self.bench is None:
            raise ValueError("data.length is for data.type fake and for --bench; leave it out")
        if self.clean_output_dir and self.ckpt is not None and self.ckpt.resume_step is not None:
            raise ValueError("clean_output_dir deletes the checkpoint that ckpt.resume_step asks for; leave one out")
        if not self.loss_mask.roles():
            raise ValueError("loss_mask leaves no role to learn from; switch one on, such as --loss-mask.assistant")
        return self
