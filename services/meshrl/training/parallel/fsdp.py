"""Prepares a policy's blocks for training: checkpointed and compiled, then sharded over the mesh (FSDP2).

Checkpointing and compilation replace a block's `forward`, so that every parameter keeps its Hugging Face name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
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

from meshrl.models.attention import ATTENTION_NAME, packed_attention, use_attention
from meshrl.models.kernels.fused_attention import OPERATOR
from meshrl.models.load import DTYPES
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.routers import Routers
from meshrl.models.shared_prefix import PREFIX_OPERATOR
from meshrl.models.state import stays_float32
from meshrl.training.model_config import (
    AcMode,
    ActivationCheckpointConfig,
    ActivationOffloadConfig,
    CompileConfig,
    TrainerModelConfig,
)
from meshrl.training.parallel.rank_group import RankGroup

MOST_GRAPHS = 64  # of a block's code; beyond, torch runs it uncompiled

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
    """The repeated layers of a model: members of its lists whose classes transformers does not split, or else the
    longest list. Raises ValueError without any list."""
    lists = [list(module) for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    whole = set(model._no_split_modules or ())
    blocks = [module for each in lists for module in each if type(module).__name__ in whole]
    blocks = blocks or max(lists, key=len, default=[])
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard or checkpoint; train it unsharded")
    return blocks


def prepare_blocks(policy: PackedPolicy, config: TrainerModelConfig) -> None:
    blocks = transformer_blocks(policy.model)
    ac = config.ac if isinstance(config.ac, ActivationCheckpointConfig) else None  # auto_settings has chosen before
    compiled = config.compile if isinstance(config.compile, CompileConfig) else None
    checkpointed = [] if ac is None else blocks[:: ac.freq]
    # torch compiles nothing of a checkpoint in which a graph breaks, so a mixture's is around what is compiled.
    around = compiled is not None and bool(policy.routers.holders)
    if ac is not None and not around:
        for block in checkpointed:
            block.forward = _checkpointed(block.forward, ac.mode, policy.routers)
    if compiled is not None:
        # The experts' products have other shapes in each pass, and routers are watched and given choices between them.
        if compiled.fullgraph and policy.routers.holders:
            raise ValueError(
                "model.compile.fullgraph: the experts of a mixture are left out of the graph, so a block is never one;"
                " leave fullgraph out"
            )
        for holder in policy.routers.holders:
            holder.forward = torch.compiler.disable(holder.forward)  # type: ignore[no-untyped-call]  # torch's
        from torch._dynamo import config as limits  # takes a second

        # Runs with adapters of other ranks and layers have graphs of their own, and so have the rows that they share.
        limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
        for block in blocks:
            block.forward = torch.compile(block.forward, fullgraph=compiled.fullgraph, backend=compiled.backend)
    if ac is not None and around:
        # A graph may overwrite what a checkpoint keeps of its inside, so attention stays outside of graphs; on padded
        # rows it is the model's own.
        mode = ac.mode if policy.packed else "full"
        if mode != "full":
            apart = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]  # torch's
            use_attention(policy.model, f"{ATTENTION_NAME}_apart", apart)
        for block in checkpointed:
            block.forward = _checkpointed(block.forward, mode, policy.routers)
    if config.ac_offloading is not None:  # around what is compiled, which cannot have hooks inside
        for block in checkpointed:
            block.forward = _offloaded(block.forward, config.ac_offloading)


def shard(
    policy: PackedPolicy,
    config: TrainerModelConfig,
    parallel: RankGroup,
    compute_dtype: torch.dtype,
    divided: Sequence[nn.Module] = (),
) -> None:
    """Shards each block, and then the rest (embeddings, last norm, head), over the mesh of the group.

    Parameters are gathered in `compute_dtype`, but for routers that engines compute in float32; gradients are summed in
    `reduce_dtype`. The modules of `divide_experts`, `divided`, are sharded over the ranks with the same experts.
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
    exact = dataclasses.replace(precision, param_dtype=torch.float32)
    for router in _float32_routers(policy.model):
        apply(router, mesh=parallel.mesh, reshard_after_forward=reshard, mp_policy=exact)
    for block in transformer_blocks(policy.model):
        apply(block, mesh=parallel.mesh, reshard_after_forward=reshard)
    apply(policy, mesh=parallel.mesh, reshard_after_forward=False)  # its backward begins where its forward ends
    if parallel.mesh.size() == 1:
        return  # a sum of one; the factor would cost another pass over all gradients
    for unit in _units(policy):  # sums, not means: right for any number of ranks that share rows or experts
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # which not all backends can do while they scale


def _float32_routers(model: PreTrainedModel) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if name.endswith((".gate", ".router")) and own and all(stays_float32(model, each) for each in own):
            yield module


class StepPasses:
    """What a sharded policy keeps between the rows of a step.

    With `reshard_after_forward` false, parameters stay gathered, and gradients are added up on each rank and summed
    over the ranks after the last row. A unit on one rank alone sums nothing: its total becomes the gradient of its
    master weights, without a copy.
    """

    def __init__(self, policy: nn.Module, config: TrainerModelConfig) -> None:
        self._units = _units(policy)
        self._gathered = config.reshard_after_forward is False
        adds_up = config.reduce_dtype == "float32"  # rows are never added up in bfloat16
        self._alone = {
            unit
            for unit in self._units
            if adds_up and not config.fsdp_cpu_offload and (group := _group(unit)) and group.mesh_info.mesh.size() == 1
        }
        self._waiting = set(self._units) if self._gathered and adds_up else self._alone
        self._used: set[object] = set()
        for unit in self._units:
            cast("nn.Module", unit).register_forward_pre_hook(lambda module, _: self._used.add(module))

    def before_row(self, *, last: bool) -> None:
        for unit in self._units:
            waits = unit in self._waiting and not (last and unit not in self._alone)
            unit.set_reshard_after_backward(last or not self._gathered, recurse=False)
            # A unit that no row has gone through has no place for a gradient.
            unit.set_requires_gradient_sync(not waits or unit not in self._used, recurse=False)

    def after_rows(self) -> None:
        """Makes every gradient that of the sharded parameter."""
        for unit in self._alone:
            for parameter in _group(unit).fsdp_params:
                if parameter.unsharded_accumulated_grad is not None:
                    added = parameter.unsharded_accumulated_grad_data
                elif unit in self._used and parameter.unsharded_param.grad is not None:  # of the same type as sums
                    added = parameter.unsharded_grad_data
                else:
                    continue
                gradient, held = parameter.to_sharded_dtensor(added.contiguous()), parameter.sharded_param
                held.grad = gradient if held.grad is None else held.grad.add_(gradient)
        self.drop()

    def drop(self) -> None:
        """Forgets the rows' gradients."""
        for unit in self._waiting:
            for parameter in group.fsdp_params if (group := _group(unit)) else ():
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _group(unit: FSDPModule) -> Any:
    """The unit's parameters, if any: torch has no other way to gradients that are not yet summed."""
    return unit._get_fsdp_state()._fsdp_param_group


def reshard(policy: nn.Module) -> None:
    """Frees what a pass without a backward pass has left gathered."""
    for unit in _units(policy):
        unit.reshard()


def _units(policy: nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _checkpointed(forward: Callable[..., object], mode: AcMode, routers: Routers) -> Callable[..., object]:
    selective: dict[str, Any] = {}
    if mode != "full":
        selective["context_fn"] = functools.partial(_selective_contexts, products=mode == "selective")

    def run(*args: object, **kwargs: Any) -> object:
        again = routers.as_now(forward)
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=True, **selective, **kwargs)

    return run


def _offloaded(forward: Callable[..., object], config: ActivationOffloadConfig) -> Callable[..., object]:
    smallest = int(config.min_mib * 2**20)

    def run(*args: object, **kwargs: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_to_host, smallest), _from_host):
            return forward(*args, **kwargs)

    return run


def _selective_contexts(*, products: bool) -> tuple[object, object]:
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
    """To pinned memory; the stream's order keeps the copy before any reuse."""
    if not tensor.is_cuda or tensor.is_leaf or tensor.nbytes < smallest:
        return tensor.device, tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host


def _from_host(kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, tensor = kept
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
