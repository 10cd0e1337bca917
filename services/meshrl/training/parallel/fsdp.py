"""Prepares a policy's blocks for training: checkpointed, compiled, then sharded over the mesh (FSDP2); before a step.

The order matters and is kept here: activation checkpointing inside torch.compile inside `fully_shard`. Checkpointing
and compilation replace a block's `forward`, not the block, so that every parameter keeps its Hugging Face name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from meshrl.models.fused_attention import OPERATOR
from meshrl.models.load import DTYPES
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.routers import Routers
from meshrl.models.shared_prefix import PREFIX_OPERATOR
from meshrl.training.model_config import (
    ActivationCheckpointConfig,
    ActivationOffloadConfig,
    CompileConfig,
    TrainerModelConfig,
)
from meshrl.training.parallel.rank_group import RankGroup

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
# FSDP marks what it does for profilers. Of experts that are a unit of their own it marks more when their block is
# computed again, which torch would take for another computation.
_MARKS = frozenset(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def transformer_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of a model: the members of its lists whose classes transformers does not split.

    For a model that names no such class, the longest list. Raises ValueError when it has no list at all.
    """
    lists = [list(module) for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    whole = set(model._no_split_modules or ())
    blocks = [module for each in lists for module in each if type(module).__name__ in whole]
    blocks = blocks or max(lists, key=len, default=[])
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard or checkpoint; train it unsharded")
    return blocks


def prepare_blocks(policy: PackedPolicy, config: TrainerModelConfig) -> None:
    """Checkpoints and compiles the blocks as configured."""
    blocks = transformer_blocks(policy.model)
    if isinstance(config.ac, ActivationCheckpointConfig):  # auto_settings has chosen before
        for block in blocks[:: config.ac.freq]:
            _set_forward(block, _checkpointed(block.forward, config.ac, config.ac_offloading, policy.routers))
    if isinstance(config.compile, CompileConfig):
        # The experts' products have other shapes in each pass, and routers are watched and given choices between them.
        if config.compile.fullgraph and policy.routers.holders:
            raise ValueError(
                "model.compile.fullgraph: the experts of a mixture are left out of the graph, so a block is never one;"
                " leave fullgraph out"
            )
        for holder in policy.routers.holders:
            _set_forward(holder, torch.compiler.disable(holder.forward))  # type: ignore[no-untyped-call]  # torch's
        for block in blocks:
            _set_forward(
                block, torch.compile(block.forward, fullgraph=config.compile.fullgraph, backend=config.compile.backend)
            )


def shard(
    policy: PackedPolicy,
    config: TrainerModelConfig,
    parallel: RankGroup,
    compute_dtype: torch.dtype,
    divided: Sequence[nn.Module] = (),
) -> None:
    """Shards each block, and then what is left (embeddings, last norm, head), over the mesh of a group that has one.

    Parameters are gathered in `compute_dtype`, gradients are summed over the ranks, in `reduce_dtype`. `divided` are
    what `divide_experts` gave: modules that are sharded over the ranks that have the same experts.
    """
    assert parallel.mesh is not None, "a group of one on a CPU shards nothing"
    reshard = config.reshard_after_forward is not False
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=DTYPES[config.reduce_dtype], cast_forward_inputs=False
    )
    pinned = parallel.mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if config.fsdp_cpu_offload else OffloadPolicy()
    apply = functools.partial(fully_shard, mp_policy=precision, offload_policy=offload)
    if parallel.experts is not None:
        *copies, ranks, _ = parallel.experts.mesh_dim_names or ()
        for module in divided:
            apply(module, mesh=parallel.experts[(*copies, ranks)], reshard_after_forward=reshard)
    for block in transformer_blocks(policy.model):
        apply(block, mesh=parallel.mesh, reshard_after_forward=reshard)
    apply(policy, mesh=parallel.mesh, reshard_after_forward=False)  # its backward begins where its forward ends
    if parallel.mesh.size() == 1:
        return  # a sum of one; the factor would cost another pass over all gradients
    for unit in _units(policy):  # sums, not means: right for any number of ranks that share rows or experts
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # which not all backends can do while they scale


class GatheredStep:
    """Parameters of a sharded policy that stay gathered over the rows of a step, and gradients that are summed after
    the last, as `reshard_after_forward` false has it.

    Rows then add to a gradient in `reduce_dtype` on each rank; ranks and master weights see it once.
    """

    def __init__(self, policy: nn.Module, config: TrainerModelConfig) -> None:
        self._units = _units(policy) if config.reshard_after_forward is False else []
        self._sums_once = config.reduce_dtype == "float32"  # rows are never added up in bfloat16
        self._used: set[object] = set()
        for unit in self._units:
            cast("nn.Module", unit).register_forward_pre_hook(lambda module, _: self._used.add(module))

    def before_row(self, *, last: bool) -> None:
        """To be called before the forward and backward pass of each row."""
        for unit in self._units:
            unit.set_reshard_after_backward(last, recurse=False)
            # A unit that no row goes through has no place for a gradient yet.
            unit.set_requires_gradient_sync(last or not self._sums_once or unit not in self._used, recurse=False)

    def drop(self) -> None:
        """Forgets what rows have added so far, after a failure among them."""
        for unit in self._units:
            group = unit._get_fsdp_state()._fsdp_param_group  # torch has no other way to it
            for parameter in () if group is None else group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def reshard(policy: nn.Module) -> None:
    """Frees what a pass without a backward pass has left gathered, so that parameters are the master weights."""
    for unit in _units(policy):
        unit.reshard()


def _units(policy: nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _set_forward(block: nn.Module, forward: Callable[..., object]) -> None:
    block.forward = forward  # the block, and so its parameters' names, stays


def _checkpointed(
    forward: Callable[..., object],
    config: ActivationCheckpointConfig,
    offload: ActivationOffloadConfig | None,
    routers: Routers,
) -> Callable[..., object]:
    selective: dict[str, Any] = {}
    if config.mode != "full":
        selective["context_fn"] = functools.partial(_selective_contexts, products=config.mode == "selective")

    def run(*args: object, **kwargs: Any) -> object:
        again = routers.as_now(forward)
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=True, **selective, **kwargs)

    if offload is None:
        return run
    smallest = int(offload.min_mib * 2**20)

    def run_offloaded(*args: object, **kwargs: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_to_host, smallest), _from_host):
            return run(*args, **kwargs)

    return run_offloaded


def _selective_contexts(*, products: bool) -> tuple[object, object]:
    """Keeps attention's output and, with `products`, every second matrix product: slow to repeat, cheap to keep."""
    SAC_IGNORED_OPS.update(_MARKS)
    seen = {True: 0, False: 0}

    def decide(context: SelectiveCheckpointContext, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
        if operator in _ATTENTION or operator.name() in (OPERATOR, PREFIX_OPERATOR):
            return CheckpointPolicy.MUST_SAVE
        if products and operator in _PRODUCTS:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[object, object] = create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]  # torch's
    return contexts


def _to_host(smallest: int, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """Copies a large saved activation to pinned memory; the stream's order keeps the copy before any reuse."""
    if not tensor.is_cuda or tensor.is_leaf or tensor.nbytes < smallest:
        return tensor.device, tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host


def _from_host(kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, tensor = kept
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
