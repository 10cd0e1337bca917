"""The tensors from which a run resumes exactly, by name.

Names are the model's own, whatever the sharding, so that another number of ranks can read the state. The optimizer's
settings are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshrl.training.checkpoints.files import CheckpointError
from meshrl.training.run_state import RunState

_MODEL, _OPTIMIZER = "model", "optimizer"


def run_tensors(model: nn.Module, run: RunState) -> dict[str, torch.Tensor]:
    """This rank's shards of the trained tensors and optimizer state, sharing memory with model and run.

    A run over a set has its mounted adapters and modules trained whole; another has all parameters and persistent
    buffers. Keys are `model/NAME` and `optimizer/KEY/NAME`. For use within `run.optimizer.state_open()`.
    """
    parameters = dict(model.named_parameters())
    if run.adapters is not None:
        parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    tensors = {f"{_MODEL}/{name}": parameter.detach() for name, parameter in parameters.items()}
    if run.adapters is None:
        every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # tied ones too
        tensors |= {
            f"{_MODEL}/{name}": buffer.detach() for name, buffer in model.state_dict().items() if name not in every_name
        }
    owners = _owners(run)
    for name, parameter in parameters.items():
        if parameter in owners:
            for key, value in owners[parameter].state.get(parameter, {}).items():
                if value is not None:
                    tensors[f"{_OPTIMIZER}/{key}/{name}"] = value
    return tensors


def optimizer_kind(run: RunState) -> str:
    return "+".join(sorted({type(part).__name__ for part in run.optimizer.parts}))


def _owners(run: RunState) -> dict[torch.Tensor, torch.optim.Optimizer]:
    return {
        parameter: part for part in run.optimizer.parts for group in part.param_groups for parameter in group["params"]
    }


def tensors_to_fill(
    model: nn.Module, run: RunState, saved: Metadata, folder: Path, *, with_optimizer: bool = True
) -> dict[str, torch.Tensor]:
    """The tensors to load a saved state into: the run's own, and new ones for an optimizer without state.

    Raises CheckpointError when the state is of another model, or of other trainable parameters.
    """
    found = dict(saved.state_dict_metadata)
    present = run_tensors(model, run)
    fill = {name: tensor for name, tensor in present.items() if name.startswith(f"{_MODEL}/")}
    held = {name: entry for name, entry in found.items() if name.startswith(f"{_MODEL}/")}
    _check_same_model(fill, held, folder)
    owners, parameters = _owners(run), dict(model.named_parameters())
    fused = {  # their optimizer keeps its scalars where the parameters are
        p
        for part in run.optimizer.parts
        for group in part.param_groups
        if group.get("fused") or group.get("capturable")
        for p in group["params"]
    }
    for full_name in sorted(found.keys() - held.keys()) if with_optimizer else ():
        entry, name = found[full_name], full_name.split("/", 2)[2]
        parameter = parameters.get(name)
        if parameter is None or parameter not in owners or not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{folder} was trained with {name} trainable, which this run leaves alone; set model.lora as it was"
            )
        dtype = entry.properties.dtype
        if full_name in present:
            fill[full_name] = present[full_name]
        elif entry.size == parameter.shape:
            fill[full_name] = run.optimizer.empty_state(parameter, dtype)
        else:  # a count of steps, or the like
            device = parameter.device if parameter in fused else torch.device("cpu")
            fill[full_name] = torch.empty(entry.size, dtype=dtype, device=device)
    return fill


def _check_same_model(own: Mapping[str, torch.Tensor], held: Mapping[str, object], folder: Path) -> None:
    advice = "resume with the model.name and model.lora that it was trained with"
    for one, other, what in ((own, held, "which it lacks"), (held, own, "which this model has not")):
        strange = sorted(name.removeprefix(f"{_MODEL}/") for name in one.keys() - other.keys())
        if strange:
            holder = "holds" if one is held else "is for a model without"
            raise CheckpointError(f"{folder} {holder} {strange[0]}, {what} ({len(strange)} in all); {advice}")
    for name, tensor in own.items():
        entry = held[name]
        assert isinstance(entry, TensorStorageMetadata), name
        shape, dtype = tuple(entry.size), entry.properties.dtype
        if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{folder}: {name.removeprefix(f'{_MODEL}/')} is {dtype} {shape} there, and {tensor.dtype} "
                f"{tuple(tensor.shape)} in this model; {advice}, and with its model.dtype"
            )


def take_over(model: nn.Module, run: RunState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills the optimizer."""
    owners, parameters = _owners(run), dict(model.named_parameters())
    for part in run.optimizer.parts:
        part.state.clear()
    for full_name, value in tensors.items():
        if full_name.startswith(f"{_OPTIMIZER}/"):
            _, key, name = full_name.split("/", 2)
            owners[parameters[name]].state[parameters[name]][key] = value
