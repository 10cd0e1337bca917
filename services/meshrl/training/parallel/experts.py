"""Expert parallelism: each rank keeps some of a layer's experts and is sent the tokens that go through them.

transformers has the exchange of tokens and a plan for each family (`base_model_ep_plan`). It is applied here to a model
without storage; FSDP then shards each rank's experts over the ranks that keep the same ones. This module is the one
place that touches those functions.
"""

from __future__ import annotations

import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from meshrl.models.expert_lora import ExpertAdapter
from meshrl.models.experts import expert_layers
from meshrl.training.parallel.plan import EXPERTS

try:
    from transformers.distributed.tensor_parallel import apply_expert_parallelism
except ImportError:  # before transformers 5.19
    apply_expert_parallelism = None

DISPATCH = "ep_dispatch_experts"  # the style of a module that sends tokens to the ranks of their experts


def experts_reason(model: PreTrainedModel, ep: int) -> str | None:
    """Why the experts of the model cannot be divided among `ep` ranks, and what to do; None when they can."""
    layers = expert_layers(model, model.config)
    if not layers:
        return "it has no experts; set model.ep = 1"
    if apply_expert_parallelism is None:
        return f"transformers {transformers.__version__} cannot; install 5.19 or newer, or set model.ep = 1"
    if DISPATCH not in (model.ep_plan or {}).values():
        return "transformers has no plan for its experts; set model.ep = 1, and FSDP shards them"
    if odd := [layer.count for layer in layers if layer.count % ep]:
        return f"it has {odd[0]} experts, no multiple of {ep}; set model.ep to a divisor"
    return None


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh, tensor: DeviceMesh | None) -> list[nn.Module]:
    """Leaves each rank its experts of a model without storage; returns the modules that hold them.

    `mesh` is that of ParallelPlan.experts_shape. The ranks of `tensor` have the same tokens, of which each sends some
    to their experts. These modules must not be compiled (see `prepare_blocks`): all ranks
    exchange tokens in the order of the program.
    """
    apply_expert_parallelism(model, mesh[EXPERTS], tensor, dict(model.ep_plan))
    for adapter in model.modules():
        if isinstance(adapter, ExpertAdapter):
            each = adapter.count // mesh[EXPERTS].size()
            adapter.own = slice(each * mesh[EXPERTS].get_local_rank(), each * (mesh[EXPERTS].get_local_rank() + 1))
    return [layer.module for layer in expert_layers(model, model.config)]
