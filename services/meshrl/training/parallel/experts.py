"""Expert parallelism: each rank keeps some of a layer's experts and is sent the tokens that go through them.

Ranks first exchange how many tokens go to each expert: the one thing in a layer that the host waits for. All
reordering is by permutations with known inverses, so gradients are gathered, not added up. FSDP then shards each rank's
experts over the ranks that keep the same ones. Families are those with a `base_model_ep_plan`.

Shapes: T tokens, K experts of each, S = T K pairs, M pairs that this rank is sent, R ranks, E experts of a rank, H
hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear

from meshrl.models.expert_lora import ExpertAdapter, with_adapters
from meshrl.models.experts import expert_layers
from meshrl.models.sharded import local
from meshrl.models.shares import TensorShare
from meshrl.training.parallel.plan import EXPERTS

DISPATCH = "ep_dispatch_experts"  # transformers' style of experts that are called with tokens, choices and weights
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def experts_reason(model: PreTrainedModel, ep: int) -> str | None:
    """Why `ep` ranks cannot divide the experts, and what to do; None when they can."""
    layers = expert_layers(model, model.config)
    if not layers:
        return "it has no experts; set model.ep = 1"
    if DISPATCH not in getattr(model, "ep_plan", {}).values():  # transformers before 5.19 has no such plans
        version = f"transformers {transformers.__version__}"
        return f"{version} has no plan for its experts; set model.ep = 1, and FSDP shards them"
    if odd := [layer.count for layer in layers if layer.count % ep]:
        return f"it has {odd[0]} experts, no multiple of {ep}; set model.ep to a divisor"
    return None


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh, tensor: DeviceMesh | None) -> list[nn.Module]:
    """Leaves each rank its experts of a model without storage; returns the modules that hold them.

    `mesh` is that of ParallelPlan.experts_shape. The ranks of `tensor` have the same tokens, of which each sends some.
    These modules must not be compiled: all ranks exchange tokens in the order of the program.
    """
    ranks, share = mesh[EXPERTS], None if tensor is None else TensorShare.of(tensor.get_group())
    modules = [layer.module for layer in expert_layers(model, model.config)]
    for experts in modules:
        for name, whole in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(whole.detach(), ranks, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        count = whole.shape[0]
        compute: Compute = functools.partial(_products, experts)
        adapters = [module for module in experts.modules() if isinstance(module, ExpertAdapter)]
        for adapter in adapters:
            each = adapter.count // ranks.size()
            adapter.own = slice(each * ranks.get_local_rank(), each * (ranks.get_local_rank() + 1))
        if adapters:
            compute = functools.partial(with_adapters, experts, compute)
        experts.forward = functools.partial(_forward, compute, count, ranks.get_group(), share)
    return modules


def _forward(
    compute: Compute,
    count: int,
    group: dist.ProcessGroup,
    share: TensorShare | None,
    hidden_TH: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    if share is None:
        return _through_experts(compute, count, group, hidden_TH, chosen_TK, weights_TK)
    rows = torch.arange(len(hidden_TH), device=hidden_TH.device).tensor_split(share.size)[share.rank]
    hidden, weights = share.copied(hidden_TH)[rows], share.copied(weights_TK)[rows]
    own = _through_experts(compute, count, group, hidden, chosen_TK[rows], weights)
    return share.summed(torch.zeros_like(hidden_TH).index_copy(0, rows, own))


def _through_experts(
    compute: Compute,
    count: int,
    group: dist.ProcessGroup,
    hidden_TH: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """(T, H); ranks have different tokens."""
    experts_S, each = chosen_TK.flatten(), chosen_TK.shape[1]
    order_S = experts_S.argsort()
    back_S = _inverse(order_S)
    sent_RE = torch.zeros(count, dtype=torch.long, device=experts_S.device)
    sent_RE = sent_RE.scatter_add_(0, experts_S, torch.ones_like(experts_S)).view(group.size(), -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE, group=group)
    sizes = _to_host(torch.stack([sent_RE.sum(1), received_RE.sum(1)]))
    leaving_SH = _reordered(hidden_TH, order_S, back_S, each)
    sent, received = sizes()
    arrived_MH = _exchanged(leaving_SH, sent, received, group)
    order_M = _by_expert(received_RE, sum(received))
    back_M = _inverse(order_M)
    made_MH = compute(_reordered(arrived_MH, order_M, back_M, 1), received_RE.sum(0))
    returned_SH = _exchanged(_reordered(made_MH, back_M, order_M, 1), received, sent, group)
    pairs_TKH = _reordered(returned_SH, back_S, order_S, 1).view(*chosen_TK.shape, -1)
    outputs_TH: torch.Tensor = (pairs_TKH * weights_TK[..., None]).sum(1)
    return outputs_TH.to(hidden_TH.dtype)


def _products(experts: Any, tokens_MH: torch.Tensor, tokens_E: torch.Tensor) -> torch.Tensor:
    if not len(tokens_MH):  # gradients, which other ranks wait for, come of at least one
        first_E = torch.arange(len(tokens_E), device=tokens_E.device) == 0
        return _products(experts, tokens_MH.sum(0, keepdim=True), first_E.long())[:0]
    ends_E = tokens_E.cumsum(0).to(torch.int32)

    def product(inputs: torch.Tensor, name: str) -> torch.Tensor:
        bias = local(getattr(experts, f"{name}_bias")) if experts.has_bias else None
        each = None if bias is None else bias.repeat_interleave(tokens_E, 0, output_size=len(inputs))
        made: torch.Tensor = _grouped_linear(
            inputs, local(getattr(experts, name)), ends_E, bias=each, is_transposed=experts.is_transposed
        )
        return made

    if experts.has_gate:
        return product(experts._apply_gate(product(tokens_MH, "gate_up_proj")), "down_proj")
    return product(experts.act_fn(product(tokens_MH, "up_proj")), "down_proj")


def _by_expert(received_RE: torch.Tensor, pairs: int) -> torch.Tensor:
    """The order (M,) that sorts the pairs of all ranks, which come sorted rank by rank."""
    of_sender = (received_RE.flatten().cumsum(0) - received_RE.flatten()).view_as(received_RE)
    lengths = received_RE.t().flatten()
    shift = of_sender.t().flatten() - (lengths.cumsum(0) - lengths)
    return torch.arange(pairs, device=lengths.device) + shift.repeat_interleave(lengths, output_size=pairs)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _to_host(numbers: torch.Tensor) -> Callable[[], Any]:
    """Begins a copy; the result waits for it alone, not for the device's later work."""
    if not numbers.is_cuda:
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    copied.record()

    def wait() -> Any:
        copied.synchronize()
        return host.tolist()

    return wait


class _Rows(torch.autograd.Function):
    """Rows (S, H) in an order (S,), each of the given ones `each` times; `inverse` is the order back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, each: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.each = each
        return rows[order if each == 1 else order // each]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        back = gradient[inverse]
        return back if ctx.each == 1 else back.view(-1, ctx.each, back.shape[1]).sum(1), None, None, None


class _Exchanged(torch.autograd.Function):
    """Rows of other ranks, `received` from each, for `sent` rows to each."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = gradient.new_empty((sum(ctx.sent), gradient.shape[1]))
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


_reordered: Callable[..., torch.Tensor] = _Rows.apply
_exchanged: Callable[..., torch.Tensor] = _Exchanged.apply
