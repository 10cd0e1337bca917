"""Builds the learner of the RL trainer and the SFT trainer: model, adapters, sharding.

The model is made without storage, prepared, sharded (not for one process on a CPU), and only then filled, so no rank
holds a sharded model whole.
"""

from __future__ import annotations

import torch
from loguru import logger
from torch import nn

from meshrl.models.adapters import AdapterScale, AdapterSet
from meshrl.models.families import learned_positions
from meshrl.models.load import DTYPES, ModelError, empty_model, fill_model, resolve_dtype
from meshrl.models.logprobs import LOGITS_CPU, LOGITS_GPU, PackedPolicy
from meshrl.models.lora import coverage, make_set, prepare_lora, reset_lora
from meshrl.models.shares import TensorShare
from meshrl.training.checkpoints.random_state import seed_rank
from meshrl.training.learner import Learner
from meshrl.training.model_config import CompileConfig, LoraConfig, TrainerModelConfig
from meshrl.training.parallel.check import check_layout
from meshrl.training.parallel.experts import divide_experts
from meshrl.training.parallel.fsdp import StepPasses, prepare_blocks, shard
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.parallel.tensor import divide_layers


def build_learner(
    config: TrainerModelConfig,
    *,
    parallel: RankGroup,
    seed: int = 0,
    seq_len: int | None = None,
    max_logits_bytes: int | None = None,
    random_weights: bool = False,
) -> Learner:
    """Collective.

    `auto` counts as off here (see `auto_settings`). `seq_len`: the most tokens of a sample, if known.
    `max_logits_bytes` None suits the device. Raises ModelError, and ValueError for unsuitable settings.
    """
    compute_dtype = resolve_dtype(config)
    if compute_dtype not in DTYPES.values():
        raise ModelError(
            f"model.name {config.name!r} is stored in {str(compute_dtype).removeprefix('torch.')}, in which gradients"
            " underflow; set model.dtype to bfloat16, for its engines as well"
        )
    on_gpu = parallel.device.type == "cuda"
    # Master weights are float32, since small updates drown in bfloat16; weights that adapters leave alone need none.
    stored_dtype = torch.float32 if config.lora is None else compute_dtype
    model = empty_model(config, dtype=stored_dtype)
    learned = learned_positions(model)
    if seq_len is not None and learned is not None and seq_len > learned:
        raise ValueError(
            f"seq_len {seq_len} is beyond the {learned} positions that model.name {config.name!r} has learned; set it"
            f" to {learned}"
        )
    check_layout(model, config, parallel.plan)
    if config.lora is not None:
        prepare(model, config.lora)
    policy = PackedPolicy(
        model,
        compute_dtype=compute_dtype,
        max_logits_bytes=max_logits_bytes or (LOGITS_GPU if on_gpu else LOGITS_CPU),
        attn=config.attn,
        device=parallel.device,
        autocast=parallel.mesh is None,
        compile_head=isinstance(config.compile, CompileConfig) and on_gpu,
        one_pass=not parallel.plan.is_alone,
        context=parallel.context,
        tensor=None if parallel.tensor is None else TensorShare.of(parallel.tensor.get_group()),
        wide_routers=config.router_dtype == "float32" and compute_dtype is not torch.float32,
    )
    partial = [] if parallel.tensor is None else divide_layers(model, parallel.tensor)
    divided = [] if parallel.experts is None else divide_experts(model, parallel.experts, parallel.tensor)
    prepare_blocks(policy, config)
    passes = None
    if parallel.mesh is not None:
        shard(policy, config, parallel, compute_dtype, divided)
        passes = StepPasses(policy, config)
    torch.manual_seed(seed)
    policy.to_empty(device="cpu" if config.fsdp_cpu_offload else parallel.device)
    if parallel.mesh is None:
        model.tie_weights()  # which to_empty undoes, but for what is sharded
    if random_weights:
        model.initialize_weights()
    else:
        fill_model(model, config)
    if config.lora is not None:
        add_set(model, config.lora, seed=seed, device=parallel.device)
        if parallel.plan.leads:
            logger.info(coverage(model))
    seed_rank(seed, 0, parallel.plan)
    return Learner(
        policy,
        parallel,
        passes,
        pass_tokens=config.pass_tokens if isinstance(config.pass_tokens, int) else None,
        partial=[model.get_parameter(name) for name in partial],
        optim_cpu_offload=config.optim_cpu_offload,
    )


def prepare(model: nn.Module, config: LoraConfig) -> None:
    """Calls `prepare_lora` as configured."""
    prepare_lora(
        model,
        target_modules=config.target_modules,
        target_parameters=config.target_parameters,
        modules_to_save=config.modules_to_save,
    )


def new_set(model: nn.Module, config: LoraConfig, *, device: torch.device) -> AdapterSet:
    """Calls `make_set` as configured."""
    return make_set(
        model,
        AdapterScale(rank=config.rank, alpha=config.alpha, dropout=config.dropout),
        target_modules=config.target_modules,
        target_parameters=config.target_parameters,
        device=device,
    )


def add_set(model: nn.Module, config: LoraConfig, *, seed: int, device: torch.device) -> None:
    """Mounts a `new_set` with its first values."""
    new_set(model, config, device=device).mount()
    reset_lora(model, seed)
