"""A second set of weights beside a vLLM worker's live ones: filled while the engine generates, copied over in a pause.

vLLM's models load Hugging Face checkpoints into fused and sharded parameters. The shadow is the same model built once
more without storage for anything but its parameters, so that vLLM's own loading fills it. Where kernels keep weights in
a packed form of their own (CPUs), there is nothing to copy over: then the shadow is the checkpoint's tensors, and they
are loaded in the pause.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.utils import initialize_model

from meshrl.inference.vllm.files import Named

HEADROOM_BYTES = 2**30


class Shadow(Protocol):
    """Weights that are not live yet. `add` what came, in any number of calls; `finish`; then `apply` in a pause."""

    def begin(self) -> None:
        """Forgets what was added."""

    def add(self, tensors: Named) -> None:
        """Takes tensors by Hugging Face name; they are only valid during the call."""

    def finish(self) -> None:
        """All tensors were added. Raises ValueError naming parameters that got nothing."""

    def apply(self) -> None:
        """Makes the shadow live."""


class ParameterShadow:
    """The parameters of a second model instance; `apply` copies them into the live ones, whose addresses stay."""

    def __init__(self, live: nn.Module, vllm_config: Any, device: torch.device) -> None:
        """Builds the second instance. Raises ValueError when its parameters have another form than the live ones."""
        config = _config_of_its_own(vllm_config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with set_current_vllm_config(config), device:
                self._model = initialize_model(vllm_config=config).eval()
        finally:
            torch.set_default_dtype(before)
        self._live = dict(live.named_parameters())
        ours = {name: (tuple(p.shape), p.dtype) for name, p in self._model.named_parameters()}
        if ours != {name: (tuple(p.shape), p.dtype) for name, p in self._live.items()}:
            raise ValueError("vLLM has changed the form of some weights after loading them")
        self._loaded: set[str] | None = set()

    @staticmethod
    def bytes_of(live: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in live.parameters())

    def begin(self) -> None:
        self._loaded = set()

    def add(self, tensors: Named) -> None:
        loaded = self._model.load_weights(iter(tensors))
        if loaded is None or self._loaded is None:  # a model that does not say what it loaded
            self._loaded = None
        else:
            self._loaded |= set(loaded)

    def finish(self) -> None:
        if self._loaded is not None:
            missing = sorted(set(self._live) - self._loaded)
            if missing:
                raise ValueError(f"{len(missing)} parameters got no weights, first {missing[0]!r}")

    def apply(self) -> None:
        names = [name for name, _ in self._model.named_parameters()]
        shadow = dict(self._model.named_parameters())
        with torch.no_grad():
            torch._foreach_copy_([self._live[name].data for name in names], [shadow[name].data for name in names])


class CheckpointShadow:
    """The checkpoint's own tensors; `apply` has vLLM load them in place."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._tensors = {}

    def add(self, tensors: Named) -> None:
        self._tensors.update((name, tensor.clone()) for name, tensor in tensors)

    def finish(self) -> None:
        if not self._tensors:
            raise ValueError("no tensors came")

    def apply(self) -> None:
        self._runner.reload_weights(weights_iterator=iter(self._tensors.items()))
        for module in self._runner.get_model().modules():
            # A head that shares its weights with the embedding is not loaded, so it would keep its packed copy.
            if isinstance(module, ParallelLMHead) and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
        self._tensors = {}


def build_shadow(worker: Any) -> Shadow:
    """The shadow that suits a vLLM worker: its device, its memory and whether its kernels repack weights."""
    runner, device = worker.model_runner, torch.device(worker.device)
    live = runner.get_model()
    if device.type != "cuda":
        return CheckpointShadow(runner)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if ParameterShadow.bytes_of(live) + HEADROOM_BYTES > free_bytes:
        return CheckpointShadow(runner)
    try:
        return ParameterShadow(live, worker.vllm_config, device)
    except ValueError:  # quantised, for one
        return CheckpointShadow(runner)


def _config_of_its_own(vllm_config: Any) -> Any:
    """vLLM's configuration without what a second instance must not share: layers register themselves by name there."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    return config
