"""Builds the shadow of the embedded engine: the next version's tensors, beside the live ones.

Called by the engine for its agent; the engine then swaps the shadow in. A whole version becomes a set of tensors on the
engine's device. A LoRA version becomes the adapted layers' weights alone, merged here as the trainer merges them; the
base weights that they replace are kept, since the next adapter is merged into them again.

Legend: R rank of an adapter, I inputs, O outputs of a layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from meshrl.inference.embedded.broadcast_receiver import BroadcastReceiver
from meshrl.inference.embedded.live_weights import LiveWeights, Shadow
from meshrl.inference.engine import HostVersion
from meshrl.inference.out_of_memory import named_out_of_memory
from meshrl.versions import peft
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterConfig, JoinGroup, Manifest

_REMEDY = (
    "lower inference.kv_cache_bytes, inference.max_num_seqs or inference.max_model_len, which bound the KV cache, or"
    " take a device with more memory"
)


class Staging:
    """The shadow, and the engine's rank in a group of the nccl transport."""

    def __init__(self, weights: LiveWeights, device: torch.device) -> None:
        self._weights = weights
        self._device = device
        self._receiver = BroadcastReceiver(device)
        self._shadow: Shadow | None = None

    def staged(self, version: int) -> Shadow:
        """The shadow of a version. Raises MeshError VERSION_NOT_SEALED when another one, or none, is staged."""
        if self._shadow is None or self._shadow.version != version:
            held = "nothing" if self._shadow is None else f"version {self._shadow.version}"
            text = f"version {version} is not staged here, but {held}; stage it first"
            raise MeshError(Reason.VERSION_NOT_SEALED, text)
        return self._shadow

    def drop(self) -> None:
        self._shadow = None

    async def stage(self, host: HostVersion) -> None:
        """Builds the shadow from tensors in host memory. Raises MeshError LAYOUT_MISMATCH, OUT_OF_MEMORY."""
        self._shadow = None
        self._shadow = await asyncio.to_thread(self._build, host, copy=True)

    async def receive(self, manifest: Manifest) -> None:
        """Builds it from a group's broadcast. Raises MeshError GROUP_BROKEN, DIGEST_MISMATCH, OUT_OF_MEMORY."""
        self._shadow = None
        arrived: dict[str, torch.Tensor] = {}

        def sink(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
            arrived.update((name, tensor.to(self._device, copy=True)) for name, tensor in tensors)

        with self._named_out_of_memory(manifest.version):
            await self._receiver.receive(manifest, sink)
        host = HostVersion(version=manifest.version, tensors=arrived, adapter=manifest.adapter)
        self._shadow = await asyncio.to_thread(self._build, host, copy=False)

    async def join(self, group: JoinGroup) -> None:
        await self._receiver.join(group)

    async def leave(self) -> None:
        await self._receiver.leave()

    def _build(self, host: HostVersion, *, copy: bool) -> Shadow:
        with self._named_out_of_memory(host.version):
            if host.adapter is None:
                return self._weights.stage(host.version, host.tensors, copy=copy)
            merged = merge_adapter(host.version, host.adapter, host.tensors, self._weights.base, self._device)
            return self._weights.stage_changes(host.version, merged)

    def _named_out_of_memory(self, version: int) -> AbstractContextManager[None]:
        return named_out_of_memory(doing=f"staging version {version}", device=self._device, remedy=_REMEDY)


def merge_adapter(
    version: int,
    adapter: AdapterConfig,
    tensors: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Returns the merged weight of every adapted layer by Hugging Face name, to the bit as `models.lora` merges.

        W' = W + (lora_alpha / rank) B A in float32, then cast to W's dtype          (arXiv 2106.09685)

    `tensors` have PEFT's names, `base` the base weights' Hugging Face names. Raises MeshError as `peft.check_fit`.
    """
    merged: dict[str, torch.Tensor] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    for layer in peft.check_fit(version, adapter, tensors, shapes):
        a_RI = tensors[peft.tensor_name(layer, "A")].to(device).float()
        b_OR = tensors[peft.tensor_name(layer, "B")].to(device).float()
        weight_OI = base[f"{layer}.weight"]
        sum_OI = torch.add(weight_OI.float(), b_OR @ a_RI, alpha=adapter.lora_alpha / adapter.rank)
        merged[f"{layer}.weight"] = sum_OI.to(weight_OI.dtype)
    return merged
