"""A model's weights by Hugging Face name: what the trainer publishes, the hub hashes and an engine applies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshrl.models.lora import adapted_layers, is_adapter


def hf_state(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers in Hugging Face names, sorted by name.

    A tied tensor appears once, under the first of its names. Tensors share memory with the model unless `dtype`
    asks for another floating-point type; the caller clones what must outlive the next optimizer step. LoRA adapters are
    merged into their weights in float32, which is collective where those are sharded.
    """
    return dict(_tensors(model, dtype))


def _tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """What `hf_state` gives, a tensor at a time, so that a merged weight need not outlive its turn."""
    every_parameter = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if not is_adapter(name)}
    for name, tensor in model.state_dict().items():
        if name not in every_parameter:
            tensors[name] = tensor.detach()
    adapted = {f"{layer}.weight": module for layer, module in adapted_layers(model).items()}
    for name, tensor in sorted(tensors.items()):
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        yield name, (adapted[name].merged() if name in adapted else tensor).to(wanted)


@torch.no_grad()
def gather_state(model: nn.Module, dtype: torch.dtype | None = None, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """A copy of `hf_state` on the CPU, contiguous, that later optimizer steps do not touch; of a sharded model too.

    Every rank calls it, and it works one parameter after another. Shards are cast to `dtype` first, so that no more
    than that moves. Only a rank that asks to `keep` the state gets it; the others get an empty one.
    """
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(model, dtype):
        whole = _whole(tensor)
        if keep:
            gathered[name] = whole.to("cpu", copy=True).contiguous()
    return gathered


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(on_mesh, DTensor)
    return on_mesh.full_tensor()


@torch.no_grad()
def load_hf_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copies `state` (as made by `hf_state`) into the model in place.

    Raises ValueError when names or shapes differ, or the model has adapters; then nothing has been copied.
    """
    if adapted_layers(model):
        raise ValueError("a model with LoRA adapters cannot take merged weights; load them before apply_lora")
    own = hf_state(model)
    if own.keys() != state.keys():
        missing = sorted(own.keys() - state.keys())[:3]
        unknown = sorted(state.keys() - own.keys())[:3]
        raise ValueError(f"weights do not fit the model: missing {missing}, unknown {unknown}")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise ValueError(f"{name}: the model has shape {tuple(tensor.shape)}, got {tuple(state[name].shape)}")
    for name, tensor in own.items():
        tensor.copy_(state[name])
