"""LoRA adapters on a causal LM (arXiv 2106.09685): layers prepared before sharding, which sets are mounted on.

    y = x W^T + (alpha / rank) dropout(x) A^T B^T     W (out, in) frozen; A (rank, in) and B (out, rank) trained

Every parameter keeps its Hugging Face name. The matrices are those of the mounted set (`adapters`): float32, named
`<layer>.lora_A` and `<layer>.lora_B`, and outside FSDP. A "layer" is the full name of a linear layer, or of a parameter
of experts (`expert_lora`), such as model.layers.0.mlp.experts.down_proj.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from meshrl.models.adapters import A, AdapterHolder, AdapterScale, AdapterSet, B, mounted_set
from meshrl.models.expert_lora import ExpertAdapter, expert_adapters, expert_parameters
from meshrl.models.sharded import by_parts, gather_whole
from meshrl.versions import peft
from meshrl.wire.types import AdapterConfig

GATES = (".gate", "_gate", ".router", ".wg")


class LoraLinear(nn.Linear, AdapterHolder):
    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a second weight
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        self.hold(None)
        self.train(base.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # nn.Linear's name for it
        output = super().forward(input)
        if self.joined is not None:
            return self.joined.added(output, input)
        return self.adapted(output, input, self.lora_A, self.lora_B) if self.rank else output

    def adapted(
        self, output: torch.Tensor, inputs: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:
        """The base's output plus the adapter's, by A `low` and B `high`, or parts of them."""
        kept = F.dropout(inputs, self.dropout) if self.training and self.dropout else inputs
        reduced = F.linear(kept, low.to(inputs.dtype))
        return torch.add(output, F.linear(reduced, high.to(reduced.dtype)), alpha=self.scale)

    def merged(self) -> torch.Tensor:
        """W + (alpha / rank) B A in float32, sharded as W is."""
        low, high = self.lora_A.detach(), self.lora_B.detach()

        def part(own: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
            return torch.add(own.float(), high[rows] @ low[:, columns], alpha=self.scale)

        return by_parts(self.weight.detach(), part, device=low.device)


def prepare_lora(
    model: nn.Module,
    *,
    target_modules: Iterable[str],
    target_parameters: Sequence[str] = (),
    modules_to_save: Sequence[str] = (),
) -> dict[str, LoraLinear | ExpertAdapter]:
    """Freezes the model and prepares the layers that sets may adapt; returns those that the targets name.

    A target names every linear layer whose name is it or ends in "." and it, as PEFT reads it; none names all of the
    text model's blocks but gates, which are prepared in any case. `target_parameters` name parameters of experts
    likewise, and `modules_to_save` modules, which stay trainable, in float32. Must come before sharding. Raises
    ValueError, with the model unchanged, when a target names nothing or a shared weight, or there is nothing to adapt.
    """
    chosen = _chosen_layers(model, target_modules)
    _refuse_tied(model, chosen)
    whole = _whole_parameters(model, modules_to_save, {*chosen, *expert_parameters(model, target_parameters)})
    of_experts = expert_adapters(model, target_parameters)
    model.requires_grad_(False)
    for parameter in whole:
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    shared = _owners(model)
    free = {name: layer for name, layer in _block_layers(model).items() if len(shared[id(layer.weight)]) == 1}
    prepared: dict[str, LoraLinear | ExpertAdapter] = dict(of_experts)
    for name, base in (free | chosen).items():
        layer = base if isinstance(base, LoraLinear) else LoraLinear(base)
        model.set_submodule(name, layer)
        if name in chosen:
            prepared[name] = layer
    return prepared


def make_set(
    model: nn.Module,
    scale: AdapterScale,
    *,
    target_modules: Iterable[str],
    target_parameters: Sequence[str] = (),
    device: torch.device | None = None,
) -> AdapterSet:
    """A set of zeros over the prepared layers that the targets name, by default on the model's device.

    Raises ValueError for a target that names none of them.
    """
    prepared = prepared_layers(model)
    named = [*_chosen_layers(model, target_modules), *expert_parameters(model, target_parameters)]
    if strange := [name for name in named if name not in prepared]:
        raise ValueError(
            f"model.lora: {strange[0]!r} was not prepared for adapters when the model was loaded; name it in "
            "trainer.model.lora of the trainer and start it again"
        )
    chosen = {name: layer for name, layer in prepared.items() if name in set(named)}
    saved = {name: each for name, each in model.named_parameters() if each.requires_grad and not is_adapter(name)}
    return AdapterSet(prepared, chosen, scale, device=device or next(model.parameters()).device, saved=saved)


def _chosen_layers(model: nn.Module, target_modules: Iterable[str]) -> dict[str, nn.Linear]:
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen: dict[str, nn.Linear] = {}
    for target in target_modules:
        found = {name: module for name, module in linear.items() if name == target or name.endswith("." + target)}
        if not found:
            joined = _joined_experts(model)
            raise ValueError(
                f"model.lora.target_modules: {target!r} names no linear layer; this model has "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in linear})) or 'none'}"
                + (f", and {joined[0]} is of all experts: name it in model.lora.target_parameters" if joined else "")
            )
        chosen.update(found)
    chosen = chosen or _block_layers(model)
    if not chosen:
        raise ValueError(
            "model.lora: this model has no linear layer in its blocks to adapt; train it without model.lora"
        )
    return {name: module for name, module in linear.items() if name in chosen}


def _whole_parameters(model: nn.Module, targets: Sequence[str], adapted: Collection[str]) -> list[nn.Parameter]:
    owners, found = _owners(model), dict[str, nn.Parameter]()
    for target in targets:
        modules = {name: m for name, m in model.named_modules() if name == target or name.endswith("." + target)}
        own = {f"{name}.{part}": p for name, m in modules.items() for part, p in m.named_parameters()}
        if not own:
            raise ValueError(f"model.lora.modules_to_save: {target!r} names no module with parameters; leave it out")
        for name, parameter in own.items():
            if others := [other for other in owners[id(parameter)] if other not in own]:
                raise ValueError(
                    f"model.lora.modules_to_save: {name} is {others[0]} as well, since the model's configuration ties "
                    "them, and PEFT would keep a copy of one alone; leave it out"
                )
            if name in adapted or name.rpartition(".")[0] in adapted:
                raise ValueError(
                    f"model.lora.modules_to_save: {name} has an adapter, by model.lora.target_modules or "
                    "target_parameters; name it in one of them"
                )
        found |= own
    return list(found.values())


def _block_layers(model: nn.Module) -> dict[str, nn.Linear]:
    text = set(model.get_decoder().modules()) if isinstance(model, PreTrainedModel) else set(model.modules())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module in text
        and any(part.isdigit() for part in name.split("."))
        and not name.endswith(GATES)
    }


def _owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def _refuse_tied(model: nn.Module, chosen: Mapping[str, nn.Linear]) -> None:
    """A merged copy would have to differ from the weight it is tied to."""
    owners = _owners(model)
    for layer, module in chosen.items():
        others = [name for name in owners[id(module.weight)] if name != f"{layer}.weight"]
        if others:
            raise ValueError(
                f"model.lora.target_modules: {layer!r} shares its weight with {others[0]!r}, and an adapter on one of "
                "the two could not be merged, since the model's configuration ties them; leave it out"
            )


def coverage(model: nn.Module) -> str:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    adapted, mounted = adapted_layers(model), mounted_set(model)
    without = sorted({".".join(name.split(".")[-2:]) for name in linear if name not in adapted})
    joined = [name for name in _joined_experts(model) if name not in adapted]
    without += sorted({".".join(name.split(".")[-2:]) + " (all experts in one)" for name in joined})
    of_experts = sum(isinstance(layer, ExpertAdapter) for layer in adapted.values())
    return (
        f"adapters on {len(adapted) - of_experts} of {len(linear)} linear layers"
        + (f" and {of_experts} parameters of experts" if of_experts else "")
        + (f"; without: {', '.join(without)}" if without else "")
        + (f"; trained whole: {', '.join(mounted.saved)}" if mounted is not None and mounted.saved else "")
    )


def _joined_experts(model: nn.Module) -> list[str]:
    """(E, out, in) each."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and "experts." in name and not is_adapter(name)
    ]


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear | ExpertAdapter]:
    """The layers with an adapter of the mounted set, by name, in the model's order."""
    return {name: layer for name, layer in prepared_layers(model).items() if layer.rank}


def prepared_layers(model: nn.Module) -> dict[str, LoraLinear | ExpertAdapter]:
    return {
        name.replace(".adapters.", "."): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear | ExpertAdapter)
    }


def adapted_weights(model: nn.Module) -> dict[str, LoraLinear | ExpertAdapter]:
    layers = adapted_layers(model).items()
    return {name if isinstance(layer, ExpertAdapter) else f"{name}.weight": layer for name, layer in layers}


def is_adapter(parameter_name: str) -> bool:
    return parameter_name.rpartition(".")[2] in (A, B)


@torch.no_grad()
def reset_lora(model: nn.Module, seed: int) -> None:
    """The mounted set's first values: A is Kaiming-uniform with a = sqrt(5) as in PEFT, U(-1/sqrt(in), 1/sqrt(in)); B
    is zero.

    Drawn on the CPU, so that the seed alone counts.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(model).values():
        whole = torch.empty(layer.lora_A.shape)
        nn.init.kaiming_uniform_(whole.view(-1, layer.in_features), a=math.sqrt(5), generator=generator)
        layer.lora_A.copy_(whole)
        layer.lora_B.zero_()


@torch.no_grad()
def adapter_state(model: nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Copies on the CPU of the mounted set's matrices, and of modules trained whole, by name; collective.

    Only a rank that asks to `keep` the state gets it, the others get an empty one.
    """
    adapters = mounted_set(model)
    assert adapters is not None, "a model without adapters has no state of them"
    saved = {name: gather_whole(parameter.detach()) for name, parameter in adapters.saved.items()}
    if not keep:
        return {}
    flat = torch.empty_like(adapters.flat, device="cpu", pin_memory=adapters.flat.is_cuda)
    copies = adapters.by_layer(flat.copy_(adapters.flat))
    return {name: tensor.to("cpu", copy=True) for name, tensor in saved.items()} | {
        f"{name}.{part}": matrix for name, pair in copies.items() for part, matrix in zip((A, B), pair, strict=True)
    }


def adapter_config(model: nn.Module, base_name: str) -> dict[str, object]:
    """PEFT's adapter_config.json for the mounted set over the model named `base_name`."""
    adapted, mounted = adapted_layers(model), mounted_set(model)
    assert mounted is not None, "a model without adapters has no configuration of them"
    plain = {
        name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in adapted
    }
    leaves = {name: name.rpartition(".")[2] for name, layer in adapted.items() if isinstance(layer, LoraLinear)}
    targets = {name if leaf in plain else leaf for name, leaf in leaves.items()}
    targets |= {".".join(name.split(".")[-3:]) for name in adapted.keys() - leaves.keys()}
    described = AdapterConfig(
        rank=mounted.scale.rank,
        lora_alpha=mounted.scale.alpha,
        target_modules=tuple(sorted(targets)),
        base_model=base_name,
    )
    saved = sorted({name.rpartition(".")[0] for name in mounted.saved})
    return peft.config_table(described, dropout=mounted.scale.dropout) | {"modules_to_save": saved or None}


def peft_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        layer, _, part = name.rpartition(".lora_")
        if not layer:
            named[f"{peft.PREFIX}{name}"] = tensor
            continue
        stored = peft.stored_experts(tensor, part) if tensor.ndim == 3 else tensor
        named[peft.tensor_name(peft.wrapper_of(layer) if tensor.ndim == 3 else layer, part)] = stored.contiguous()
    return named


def save_adapter(folder: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, object]) -> None:
    """Writes an `adapter_state` and its `adapter_config` as PEFT's folder. Raises OSError."""
    peft.write_folder(folder, peft_state(state), config)
