"""Tensor parallelism of a model's dense layers, by transformers' plan of the family.

Pairs of layers are divided between which features stay divided: "colwise" and "rowwise". Layers that gather features
between the two stay whole, as do experts, which expert parallelism divides. If embedding and head are plain layers,
each rank has a part of the vocabulary. Applied to a model without storage, before FSDP shards a rank's part.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from meshrl.models.experts import expert_layers
from meshrl.models.families import unpacked_reason
from meshrl.models.logprobs import transforms_logits
from meshrl.models.lora import LoraLinear
from meshrl.models.sharded import local
from meshrl.models.shares import TensorShare
from meshrl.training.parallel.plan import EXPERTS, TENSOR

COLUMNS, ROWS = "colwise", "rowwise"
PARTIAL = "replicated_with_grad_allreduce"  # a norm of each head: a rank's gradient is that of its own heads
LATENT = "mla_kv_a_proj"  # whole; of its output each head's keys take the last features as they are
DIVIDED = frozenset({COLUMNS, ROWS, PARTIAL, LATENT})
WHOLE = frozenset({f"colwise_{how}" for how in ("gather_output", "rep")} | {"rowwise_split_input", "rowwise_rep"})


def tensor_reason(model: PreTrainedModel, tp: int, ep: int) -> str | None:
    """Why `tp` ranks cannot share the products, and what to do instead; None when they can."""
    plan = _styles(model)
    if (reason := unpacked_reason(model)) is not None:
        return f"{reason}, and such models are trained on whole layers; set model.tp = 1"
    if not any(style in (COLUMNS, ROWS) for style in plan.values()):
        return "transformers has no plan that divides its layers; set model.tp = 1"
    modules = dict(model.named_modules())
    for name, style in plan.items():
        if style not in DIVIDED | WHOLE or (style in DIVIDED and name not in modules):
            return f"transformers' plan has {style!r} for {name}, which is not supported; set model.tp = 1"
    if between := _between(model, plan):
        return f"{between} lies between divided layers and is not in transformers' plan; set model.tp = 1"
    text = model.config.get_text_config()
    queries, keys = attention_heads(text)
    if divides_attention(model) and (queries % tp or keys % tp):
        fitting = [n for n in range(1, keys + 1) if queries % n == keys % n == 0]
        return f"it has {queries} attention heads and {keys} key-value heads; set model.tp to one of {fitting}"
    for name, dim in divided_parameters(model).items():
        if (size := model.get_parameter(name).shape[dim]) % tp:
            return f"{name} has {size} {('rows', 'columns')[dim]}, no multiple of {tp}; set model.tp to a divisor"
    if expert_layers(model, model.config) and ep % tp:
        return f"ranks that share products divide its experts as well; set model.ep to a multiple of {tp}"
    return None


def divides_attention(model: PreTrainedModel) -> bool:
    """Whether each rank has some of the attention heads."""
    return any(style == COLUMNS and "attn" in name for name, style in _styles(model).items())


def attention_heads(text: PreTrainedConfig) -> tuple[int, int]:
    """Query and key-value heads of a layer; latent attention has a key for each query."""
    queries = int(text.num_attention_heads)
    latent = getattr(text, "kv_lora_rank", None) is not None
    return queries, queries if latent else int(getattr(text, "num_key_value_heads", None) or queries)


def divides_vocabulary(model: PreTrainedModel) -> bool:
    """Whether each rank has a part of embedding and head."""
    return bool(_vocabulary(model))


def divided_parameters(model: PreTrainedModel) -> dict[str, int]:
    """The dimension of each parameter that ranks divide, by name, one of all tied names."""
    modules = dict(model.named_modules())
    dims: dict[str, int] = {}
    for name, style in _styles(model).items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear) or style not in (COLUMNS, ROWS):
            continue
        if style == COLUMNS:
            dims |= {f"{name}.{part}": 0 for part, _ in layer.named_parameters()}
        else:
            dims[f"{name}.weight"] = 1
    named = {parameter: name for name, parameter in model.named_parameters()}
    ends = _vocabulary(model)
    return dims | {named[parameter]: 0 for end in ends for parameter in end.parameters()}


def divide_layers(model: PreTrainedModel, mesh: DeviceMesh) -> list[str]:
    """Leaves each rank its part of a model without storage; returns the names of `settle_gradients`' `partial`."""
    share = TensorShare.of(mesh.get_group())
    modules, ends = dict(model.named_modules()), _vocabulary(model)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules.values():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    for name, dim in divided_parameters(model).items():
        whole = model.get_parameter(name)
        part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
        divided = nn.Parameter(part, requires_grad=whole.requires_grad)
        for module, attribute in owners[whole]:  # several where an embedding is the head as well
            setattr(module, attribute, divided)
    partial: list[str] = []
    for layer in modules.values():
        if isinstance(layer, LoraLinear):  # of which those that are divided are given another forward below
            _set_forward(layer, functools.partial(_whole, layer, share))
    for name, style in _styles(model).items():
        layer = modules[name]
        if style in (COLUMNS, ROWS) and isinstance(layer, nn.Linear):
            _set_forward(layer, functools.partial(_columns if style == COLUMNS else _rows, layer, share))
        elif style == LATENT:
            rotary = int(model.config.get_text_config().qk_rope_head_dim)
            _set_forward(layer, functools.partial(_latent, layer.forward, rotary, share))
        elif style == PARTIAL:
            partial += [f"{name}.{attribute}" for attribute, _ in layer.named_parameters()]
    for end in ends:
        if isinstance(end, nn.Embedding):
            _set_forward(end, functools.partial(_look_up, end, share))
    return partial


@torch.no_grad()
def settle_gradients(parameters: Iterable[nn.Parameter], partial: Collection[nn.Parameter], mesh: DeviceMesh) -> None:
    """Makes the gradients of parameters that the mesh's ranks all have whole the same on each; collective.

    Of those of `partial` each rank has a part, and they are summed. The others are averaged: they differ by rounding,
    which would add up over steps.
    """
    group = mesh.get_group()
    for parameter in parameters:
        if parameter.grad is None or not isinstance(parameter, DTensor):
            continue
        if {TENSOR, EXPERTS} & set(parameter.device_mesh.mesh_dim_names or ()):
            continue
        gradient = local(parameter.grad)
        total = gradient.to(mesh.device_type)  # which may wait on the host
        if not any(parameter is each for each in partial):
            total.div_(mesh.size())
        dist.all_reduce(total, group=group)
        gradient.copy_(total)


def _styles(model: PreTrainedModel) -> Mapping[str, str]:
    within = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_modules()}
    experts = {id(each) for layer in expert_layers(model, model.config) for each in layer.module.modules()}
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if id(module) in experts)
    head = model.get_output_embeddings()
    kept = {id(head), id(model.get_input_embeddings())} | experts
    outside = {name for name, module in model.named_modules() if id(module) in kept}
    by_pattern = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in model.tp_plan.items()}
    return {
        name: style
        for pattern, style in by_pattern.items()
        for name in within
        if pattern.fullmatch(name) and name not in outside and not name.startswith(prefixes)
    }


def _between(model: PreTrainedModel, plan: Mapping[str, str]) -> str | None:
    parents = {name.rpartition(".")[0] for name, style in plan.items() if style in (COLUMNS, ROWS)}
    for name, module in model.named_modules():
        known = name in plan or isinstance(module, nn.Linear) or "Norm" in type(module).__name__
        if not known and any(f"{name}.".startswith(f"{parent}.") for parent in parents):
            for own, _ in module.named_parameters(recurse=False):
                return f"{name}.{own}"
    return None


def _vocabulary(model: PreTrainedModel) -> list[nn.Module]:
    """Embedding and head, if both can be divided."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and type(head) is nn.Linear
    return [embedding, head] if plain and not transforms_logits(model) else []


def _set_forward(layer: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    layer.forward = forward  # the layer, and so its parameters' names, stays


def _columns(layer: nn.Linear, share: TensorShare, inputs: torch.Tensor) -> torch.Tensor:
    copied = share.copied(inputs)
    output = F.linear(copied, local(layer.weight), None if layer.bias is None else local(layer.bias))
    if not isinstance(layer, LoraLinear) or not layer.rank:
        return output
    return layer.adapted(output, copied, layer.lora_A, layer.lora_B[share.own(layer.out_features)])


def _rows(layer: nn.Linear, share: TensorShare, inputs: torch.Tensor) -> torch.Tensor:
    output = F.linear(inputs, local(layer.weight))
    if isinstance(layer, LoraLinear) and layer.rank:
        output = layer.adapted(output, inputs, layer.lora_A[:, share.own(layer.in_features)], layer.lora_B)
    output = share.summed(output)
    return output if layer.bias is None else output + layer.bias


def _whole(layer: LoraLinear, share: TensorShare, inputs: torch.Tensor) -> torch.Tensor:
    """All ranks sum the gradient of an adapter, and here each has all of it."""
    output = F.linear(inputs, layer.weight, layer.bias)
    if not layer.rank:
        return output
    return layer.adapted(output, inputs, share.alike(layer.lora_A), share.alike(layer.lora_B))


def _latent(
    forward: Callable[[torch.Tensor], torch.Tensor], rotary: int, share: TensorShare, inputs: torch.Tensor
) -> torch.Tensor:
    output = forward(inputs)
    return torch.cat([output[..., :-rotary], share.copied(output[..., -rotary:])], dim=-1)


def _look_up(embedding: nn.Embedding, share: TensorShare, ids: torch.Tensor) -> torch.Tensor:
    return share.embedded(ids, embedding.weight, embedding.padding_idx)
