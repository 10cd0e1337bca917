"""Routers of vLLM's mixtures of experts with logits in float32: bfloat16 weights and inputs, the sum not rounded.

vLLM has a key for it in a few families only. Its linear layers can be replaced by name, in every process that imports
this module before it builds the model, as `worker` does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from meshrl.inference.config import ROUTER_DTYPE
from meshrl.models.routers import NARROW

ROUTERS = ("gate", "router")


class FloatLogits(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM has no types here
    """Sums in float32."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Kernels of a CPU would pack the weights and round their product."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight: torch.Tensor = layer.weight
        if x.is_cuda and x.dtype == weight.dtype != torch.float32:
            logits = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
            logits = logits.reshape(*x.shape[:-1], -1)
        else:
            logits = F.linear(x.float(), weight.float())
        return logits if bias is None else logits + bias


def widen(layer: Any) -> None:
    config = get_current_vllm_config()
    if (
        config.additional_config.get(ROUTER_DTYPE) == "float32"
        and layer.prefix.rpartition(".")[2] in ROUTERS
        and config.model_config.hf_text_config.model_type not in NARROW
        and layer.output_size == config.model_config.get_num_experts() > 0
        and type(layer.quant_method) is UnquantizedLinearMethod
    ):
        layer.quant_method = FloatLogits()
        _log_once()


@functools.cache
def _log_once() -> None:
    logger.info("the model's routers have logits in float32")


class WideReplicatedLinear(ReplicatedLinear):  # type: ignore[misc]  # as above
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        widen(self)


class WideGateLinear(GateLinear, WideReplicatedLinear):  # type: ignore[misc]  # as above
    """Also one of those above, as GateLinear is a ReplicatedLinear: adapters look for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.quant_method, FloatLogits) and self.out_dtype is None:
            self.set_out_dtype(torch.float32)  # of its own kernels


def register() -> None:
    """Has vLLM build these in place of its own; a platform's own replacement stays."""
    op_registry_oot.setdefault(ReplicatedLinear.__name__, WideReplicatedLinear)
    op_registry_oot.setdefault(GateLinear.__name__, WideGateLinear)
