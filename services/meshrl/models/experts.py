"""Experts of a model, and the parameters that a token goes through.

All families of transformers are built alike: a module whose class ends in "Experts" holds the weights of a layer's
experts, or a list named `experts` holds a module for each. Shared experts, of every token, are ordinary layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """One layer's: `module` holds the weights of `count`, of which each token goes through `per_token`."""

    module: nn.Module
    count: int
    per_token: int

    @property
    def share(self) -> float:
        return self.per_token / self.count


def expert_layers(part: nn.Module, config: PreTrainedConfig) -> list[Experts]:
    """The experts in a model of that configuration, or in a part of one, in order.

    Raises ValueError if the configuration does not name how many a token goes through.
    """
    found: list[Experts] = []
    within: set[nn.Module] = set()
    for name, module in part.named_modules():
        if module in within or not _holds_experts(name, module):
            continue
        within.update(module.modules())
        found.append(Experts(module=module, count=_count(module), per_token=_per_token(config)))
    return found


def active_parameters(model: PreTrainedModel, *, trainable_only: bool = False) -> int:
    """Parameters that multiply each token: its share of experts, and no embedding but one that is also the head."""
    share = {
        parameter: experts.share
        for experts in expert_layers(model, model.config)
        for parameter in experts.module.parameters()
    }
    head = model.get_output_embeddings()
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings -= set() if head is None else set(head.parameters())
    active: float = sum(
        parameter.numel() * share.get(parameter, 1.0)
        for parameter in model.parameters()
        if parameter not in embeddings and (parameter.requires_grad or not trainable_only)
    )
    return round(active)


def _holds_experts(name: str, module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList) and name.rsplit(".", 1)[-1] == "experts" and len(module) > 0
    return is_list or (type(module).__name__.endswith("Experts") and any(True for _ in module.parameters()))


def _count(module: nn.Module) -> int:
    if isinstance(module, nn.ModuleList):
        return len(module)
    declared = getattr(module, "num_experts", None)
    return int(declared) if declared else max(int(parameter.shape[0]) for parameter in module.parameters())


def _per_token(config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    for place in (text, getattr(text, "ffn_config", None)):
        for key in _PER_TOKEN:
            if value := getattr(place, key, None):
                return int(value[0] if isinstance(value, list) else value)
    raise ValueError(
        f"{text.model_type} has experts, and its config.json does not name how many a token goes through"
        f" ({', '.join(_PER_TOKEN)})"
    )
