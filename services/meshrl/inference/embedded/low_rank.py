"""Adapters of the embedded engine, unmerged: each row of a step gets the low-rank product of its own adapter.

y_t = W x_t + (lora_alpha / rank) B_a A_a x_t for a token t of a request with adapter a (arXiv 2106.09685)

As the trainer computes them. Experts have merged weights for each adapter, with which its tokens go through them.
Shapes: N tokens of a pass, R rank, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from meshrl.inference.engine import HostVersion
from meshrl.models.expert_lora import merge
from meshrl.versions import peft
from meshrl.wire.errors import MeshError, Reason

BASE = 0  # the number of no adapter


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedAdapter:
    """By layer; merged weights of experts by parameter."""

    number: int
    scale: float
    low: Mapping[str, torch.Tensor]  # A (R, I)
    high: Mapping[str, torch.Tensor]  # B (O, R)
    experts: Mapping[str, torch.Tensor]


Part = tuple[LoadedAdapter | None, torch.Tensor | slice]
"""An adapter, None for the base model, and its tokens of a pass."""


class AdapterLayers:
    """Used by the engine's thread."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._modules = dict(model.named_modules())
        self._weights = dict(model.named_parameters())
        self._device = device
        self._loaded: dict[int, LoadedAdapter] = {}
        self._hooked: set[str] = set()
        self._parts: dict[int, list[Part]] = {}  # of the pass under way, by its number of tokens
        self._of_all: list[Part] = []  # whatever their number

    # --- adapters ---------------------------------------------------------------------------

    def prepare(self, host: HostVersion, number: int) -> LoadedAdapter:
        """Copies an adapter to the device; on any thread. Raises MeshError LAYOUT_MISMATCH, NOT_SUPPORTED."""
        adapter = host.adapter
        assert adapter is not None
        shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        scale = adapter.lora_alpha / adapter.rank
        low, high, experts = dict[str, torch.Tensor](), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for adapted in peft.check_fit(host.version, adapter, host.tensors, shapes):
            pair = (host.tensors[peft.tensor_name(adapted.layer, part)] for part in peft.PARTS)
            a, b = (tensor.to(self._device, torch.float32, copy=True) for tensor in pair)
            weight = self._weights[adapted.name].detach()
            if adapted.experts:
                a, b = peft.read_experts(a, adapted.experts, "A"), peft.read_experts(b, adapted.experts, "B")
                experts[adapted.name] = merge(weight, a, b, scale=scale, transposed=adapted.transposed).to(weight.dtype)
            elif isinstance(self._modules[adapted.layer], nn.Linear):
                low[adapted.layer], high[adapted.layer] = a.to(weight.dtype), b.to(weight.dtype)
            else:
                kind = type(self._modules[adapted.layer]).__name__
                text = f"version {host.version} adapts {adapted.layer}, a {kind}; this engine adapts linear layers"
                raise MeshError(Reason.NOT_SUPPORTED, text)
        return LoadedAdapter(number=number, scale=scale, low=low, high=high, experts=experts)

    def add(self, adapter: LoadedAdapter) -> None:
        """Makes an adapter known to passes; between two steps."""
        self._loaded[adapter.number] = adapter
        for layer in adapter.low.keys() - self._hooked:
            self._modules[layer].register_forward_hook(functools.partial(self._add_product, layer))
        for layer in {name.rpartition(".")[0] for name in adapter.experts} - self._hooked:
            module: Any = self._modules[layer]
            module.forward = functools.partial(self._by_part, layer, module.forward)
        self._hooked |= adapter.low.keys() | {name.rpartition(".")[0] for name in adapter.experts}

    def drop(self, number: int) -> None:
        self._loaded.pop(number, None)

    # --- passes -----------------------------------------------------------------------------

    @contextmanager
    def passing(self, *numbers: NDArray[np.int64]) -> Iterator[None]:
        """For a pass whose tokens have the adapters of these numbers. Several sets: all tokens, and those of which the
        head computes logits."""
        kinds = {int(number) for each in numbers for number in np.unique(each)}
        if kinds == {BASE}:
            yield
            return
        if len(kinds) == 1:
            self._of_all = [(self._loaded[kinds.pop()], slice(None))]
        else:
            self._parts = {len(each): self._split(each) for each in numbers}
        try:
            yield
        finally:
            self._of_all, self._parts = [], {}

    def _split(self, numbers_N: NDArray[np.int64]) -> list[Part]:
        return [
            (self._loaded.get(int(number)), torch.from_numpy(np.flatnonzero(numbers_N == number)).to(self._device))
            for number in np.unique(numbers_N)
        ]

    def _parts_of(self, count: int) -> list[Part]:
        return self._of_all or self._parts.get(count, [])

    def _add_product(self, layer: str, module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> Any:
        x_NI, y_NO = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1])
        for adapter, tokens in self._parts_of(len(x_NI)):
            if adapter is not None and layer in adapter.low:
                own = x_NI[tokens]
                low_NR = F.linear(own, adapter.low[layer].to(own.dtype))
                product_NO = F.linear(low_NR, adapter.high[layer].to(own.dtype))
                y_NO[tokens] = torch.add(y_NO[tokens], product_NO, alpha=adapter.scale)
        return y_NO.reshape(output.shape)

    def _by_part(
        self, layer: str, forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *routing: torch.Tensor
    ) -> torch.Tensor:
        parts = self._parts_of(len(hidden))
        if not parts:
            return forward(hidden, *routing)
        output = torch.empty_like(hidden)
        for adapter, tokens in parts:
            with self._merged(layer, adapter):
                output[tokens] = forward(hidden[tokens], *(each[tokens] for each in routing))
        return output

    @contextmanager
    def _merged(self, layer: str, adapter: LoadedAdapter | None) -> Iterator[None]:
        merged = {} if adapter is None else {n: w for n, w in adapter.experts.items() if n.rpartition(".")[0] == layer}
        base = {name: self._weights[name].data for name in merged}
        try:
            for name, weight in merged.items():
                self._weights[name].data = weight
            yield
        finally:
            for name, weight in base.items():
                self._weights[name].data = weight
