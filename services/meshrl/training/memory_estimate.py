"""Estimates before a model is loaded whether it can be trained in this memory.

A lower bound: weights, gradients and optimizer state, which a step holds at once, and a published version's snapshot.
Activations come on top, so a long row may still be too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from meshrl.machine.memory import machine_memory
from meshrl.models.experts import expert_layers
from meshrl.models.load import ModelError, empty_model, resolve_dtype
from meshrl.training.build import new_set, prepare
from meshrl.training.config import OptimConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.parallel.tensor import divided_parameters

GRADIENT_BYTES = 4  # float32
OPTIMIZER_BYTES: Mapping[str, int] = {"adamw": 8, "muon": 4, "sgd": 4}  # a parameter: two float32 moments, or one


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes on one rank's device between the backward pass and the end of the optimizer's step."""

    parameters: int  # of the whole model
    weights: int
    gradients: int
    optimizer: int
    of_set: bool = False  # gradients and optimizer are an adapter set's, which each rank has whole
    snapshot: int = 0  # its rows of the version that is published while the next step is trained
    unsharded: int = 0  # what gradients take beyond that where no rank divides them

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.snapshot

    def over(self, times: int) -> MemoryNeed:
        """The need if so many times as many ranks hold a copy of the model."""
        divided = ("weights",) if self.of_set else ("weights", "gradients", "optimizer", "snapshot")
        parts = {name: getattr(self, name) // times for name in divided}
        return replace(self, **parts)


def memory_need(
    config: TrainerModelConfig, optim: OptimConfig, parallel: RankGroup, *, publishes: bool = False
) -> MemoryNeed:
    """The need of a rank of this group; `publishes`: versions go to engines. Raises ModelError when there is no such
    model, and ValueError for adapters that do not fit it."""
    stored_dtype = torch.float32 if config.lora is None else resolve_dtype(config)
    model = empty_model(config, dtype=stored_dtype)
    plan, parameters = parallel.plan, sum(parameter.numel() for parameter in model.parameters())
    divided = divided_parameters(model) if plan.tp > 1 else {}
    experts = {each for layer in expert_layers(model, model.config) for each in layer.module.parameters()}
    base = gathered = held = 0
    for name, parameter in model.named_parameters():
        # What ranks that share products do not divide, each of them has.
        alike = 1 if name in divided or parameter in experts else plan.tp
        held += parameter.numel() * alike // plan.shards
        base += parameter.numel() * alike // plan.shards * parameter.itemsize
        gathered += parameter.numel() * alike // plan.tp
    lora, adapters, trained = config.lora, 0, held
    if lora is not None:
        prepare(model, lora)
        adapter_set = new_set(model, lora, device=torch.device("meta"))
        adapters = adapter_set.numel
        saved = sum(parameter.numel() for parameter in adapter_set.saved.values()) // plan.shards
        base += saved * (torch.float32.itemsize - stored_dtype.itemsize)
        trained = adapters + saved
    in_host_memory = config.fsdp_cpu_offload or lora is not None  # where the snapshot is; an adapter is small
    if config.fsdp_cpu_offload:  # a set lies on the device
        base, trained = 0, adapters
    return MemoryNeed(
        parameters=parameters + adapters,
        weights=base + adapters * torch.float32.itemsize,
        gradients=trained * GRADIENT_BYTES,
        optimizer=0 if config.optim_cpu_offload else trained * state_bytes(optim),
        snapshot=trained * resolve_dtype(config).itemsize if publishes and not in_host_memory else 0,
        of_set=lora is not None,
        unsharded=0 if lora is not None else (gathered - trained) * GRADIENT_BYTES,
    )


def state_bytes(optim: OptimConfig) -> int:
    """Of the optimizer, for each parameter that is trained."""
    return 0 if optim.type == "sgd" and not optim.momentum else OPTIMIZER_BYTES[optim.type]


def check_fits(name: str, need: MemoryNeed, there: int | None, parallel: RankGroup) -> None:
    """Raises ModelError, on every rank, when some rank has too little; None is unknown. Collective."""
    device = parallel.device
    ranks = parallel.plan.world_size if device.type == "cpu" else 1  # processes that share this memory
    if not parallel.any(there is not None and need.total * ranks > there):
        return
    snapshot = f", snapshot {_gib(need.snapshot)}" if need.snapshot else ""
    each = f", by each of {ranks} processes" if ranks > 1 else ""
    raise ModelError(
        f"model.name {name!r} does not fit: to train its {need.parameters / 1e9:.3g} billion parameters takes "
        f"{_gib(need.total)} of memory on {device}{each} (weights {_gib(need.weights)}, gradients "
        f"{_gib(need.gradients)}, optimizer {_gib(need.optimizer)}{snapshot}; activations not counted), and "
        f"{_gib(there or 0)} are free here; shard it over more GPUs (deployment.num_train_gpus), train adapters "
        "(model.lora), move state to the host (model.optim_cpu_offload, model.fsdp_cpu_offload), or take a smaller one"
    )


def check_has_device(device: torch.device, environment: Mapping[str, str]) -> None:
    """Raises ModelError when this machine has more ranks than GPUs."""
    local_rank, count = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.type == "cuda" and device.index is None and local_rank >= count:
        raise ModelError(
            f"there is no GPU for rank {local_rank} of this machine, which shows {count}; lower "
            "deployment.num_train_gpus (or torchrun's --nproc-per-node), or show more in CUDA_VISIBLE_DEVICES"
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, or of this machine or container; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    memory = machine_memory()
    return None if memory is None else memory.available


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
