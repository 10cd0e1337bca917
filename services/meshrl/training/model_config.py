"""The `model` section of a trainer: the model, how it is sharded, and its trades for memory."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import ModelConfig

AcMode = Literal["full", "attention", "selective"]


class ActivationCheckpointConfig(BaseConfig):
    """Activations that are computed again in the backward pass instead of kept."""

    mode: AcMode = "full"
    """What a block keeps. full: its input. attention: also attention's output, most of the work of long rows.
    selective: that and every second matrix product, of a compiled mixture none inside its graphs."""

    freq: int = Field(default=1, ge=1)
    """Every so many blocks; 1 means all, 2 every second."""


class ActivationOffloadConfig(BaseConfig):
    """Activations that wait for the backward pass in the host's memory."""

    min_mib: float = Field(default=1.0, gt=0.0)
    """Smaller tensors stay on the device."""


class CompileConfig(BaseConfig):
    """`torch.compile` of each block."""

    fullgraph: bool = False
    """Fail where a block does not compile as one graph."""

    backend: str = "inductor"
    """Compiler, by the name that torch knows it under."""


class LoraConfig(BaseConfig):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the model stays frozen and small matrices beside it are trained."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""

    alpha: float = Field(default=32.0, gt=0.0)
    """An adapter's output is scaled by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of an adapter's inputs that is dropped in training."""

    target_modules: list[str] = Field(default_factory=list)
    """Linear layers to adapt, by the last part of their name or a whole one; empty: all of the blocks but gates."""

    target_parameters: list[str] = Field(default_factory=list)
    """Parameters of a mixture's experts to adapt as well, as PEFT names them: mlp.experts.gate_up_proj and
    mlp.experts.down_proj, or all. `rl` sets all where its engines serve that: embedded ones, and vLLM by merged
    versions (trainer.weight_broadcast.lora_adapter_only false)."""

    modules_to_save: list[str] = Field(default_factory=list)
    """Modules to train whole beside the adapters, by the last part of their name or a whole one: lm_head, embed_tokens.
    Engines take them merged alone: set trainer.weight_broadcast.lora_adapter_only to false."""


class TrainerModelConfig(ModelConfig):
    """The model that is trained. Master weights are float32; dtype is what it computes in and publishes."""

    attn: Literal["auto", "varlen", "cudnn", "sdpa"] = "auto"
    """Attention over packed rows; auto takes the fastest that the device has (sdpa on a CPU)."""

    ac: ActivationCheckpointConfig | Literal["auto"] | None = "auto"
    """Activation checkpointing; auto: as much as a row of seq_len tokens needs to fit, false: none."""

    ac_offloading: ActivationOffloadConfig | None = None
    """Keep the activations of checkpointed blocks on the host; needs ac, off by default."""

    compile: CompileConfig | Literal["auto"] | None = "auto"
    """torch.compile of each block; auto: of large models on a GPU, false: none."""

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free a block's gathered parameters and sum its gradients after each pass. false: once a step, with memory for all
    parameters and float32 gradients. auto: false if that fits."""

    pass_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Tokens up to which rows of a step go through the model together; None: each by itself. auto: 16384 on a GPU
    without an engine, as far as that needs no more checkpointing."""

    dp_replicate: int = Field(default=1, ge=1)
    """HSDP: groups of ranks that each hold the whole model, sharded within; 1 is plain FSDP."""

    cp: int = Field(default=1, ge=1)
    """Context parallel: ranks that share the tokens of a row, for rows longer than one GPU holds (Ulysses)."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel: ranks that share each matrix product of dense layers; ep of a mixture must be a multiple."""

    ep: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Expert parallel: ranks that divide a layer's experts and send each other their tokens. 1: experts are sharded
    like all else; auto: as many ranks of this machine as can, if a row is short beside the experts."""

    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory; the optimizer runs there."""

    optim_cpu_offload: bool = False
    """Keep the optimizer state in the host's memory; the optimizer runs on the device, a part at a time."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers in which gradients are summed over ranks."""

    router_dtype: Literal["float32", "model"] = "model"
    """Type of the logits of a mixture's routers, as inference.router_dtype: float32 sums without rounding, model leaves
    it to the family."""

    lora: LoraConfig | None = None
    """Train adapters instead of the model; off unless given."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.ac_offloading is not None and self.ac in (None, "auto"):
            raise ValueError("model.ac_offloading moves what model.ac keeps of a block; set model.ac as well")
        if self.fsdp_cpu_offload and self.optim_cpu_offload:
            raise ValueError(
                "model.fsdp_cpu_offload keeps the optimizer state on the host too; leave model.optim_cpu_offload out"
            )
        return self
