"""The shadow of a vLLM worker's weights: filled while the engine generates, copied over the live ones in a pause.

A second instance of the model whose parameters alone have storage, which vLLM's own loading fills; or, where kernels
pack weights (CPUs), the checkpoint's tensors, which are loaded in the pause.

Some layers rearrange their weights within the same shape once they are loaded, as mixtures of experts do on some GPUs.
That cannot be seen, so with such layers a shadow first has to make the live weights out of their checkpoint.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from loguru import logger
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model

from meshrl.inference.sizing import GIB
from meshrl.inference.vllm.file_reader import PORTION_BYTES
from meshrl.inference.vllm.installed import reload_weights, without_weights
from meshrl.versions.collective.digest import digest_bytes, sum128

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

HEADROOM_BYTES = 2**30  # stays free beside a shadow: buffers of groups, what libraries take for themselves
Weights = Iterable[tuple[str, torch.Tensor]]  # by Hugging Face name


class WorkerShadow(Protocol):
    """Weights that are not live yet. Call `add` any number of times, `finish`, then `apply` in a pause."""

    def begin(self) -> None:
        """Forgets what was added."""

    def add(self, tensors: Weights) -> None:
        """Takes tensors by Hugging Face name; they are only valid during the call."""

    def finish(self) -> None:
        """All tensors were added. Raises ValueError naming parameters that got nothing."""

    def apply(self) -> None:
        """Raises ValueError naming parameters that got nothing."""

    def rehearse(self, checkpoint: Weights) -> list[str]:
        """Loads the live weights once more, from their checkpoint; names the parameters that come out otherwise, after
        which live weights may be wrong."""


class ParameterShadow:
    """`apply` copies its parameters into the live ones, whose addresses stay."""

    def __init__(self, live: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        """Raises ValueError when its parameters have another form than the live ones."""
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

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def begin(self) -> None:
        self._loaded = set()

    def begin_as_live(self) -> None:
        shadow = self.parameters
        torch._foreach_copy_(list(shadow.values()), [self._live[name].data for name in shadow])

    def add(self, tensors: Weights) -> None:
        loaded = self._model.load_weights(iter(tensors))
        if loaded is None or self._loaded is None:  # a model that does not say what it loaded
            self._loaded = None
        else:
            self._loaded |= set(loaded)

    def finish(self) -> None:
        if self._loaded is not None:
            missing = without_weights(self._live, self._loaded)
            if missing:
                raise ValueError(f"{len(missing)} parameters got no weights, first {missing[0]!r}")

    def rehearse(self, checkpoint: Weights) -> list[str]:
        self.begin()
        self.add(checkpoint)
        self.finish()
        shadow = dict(self._model.named_parameters())
        return [name for name, live in self._live.items() if not torch.equal(shadow[name].data, live.data)]

    def apply(self) -> None:
        shadow = self.parameters
        with torch.no_grad():
            torch._foreach_copy_([self._live[name].data for name in shadow], list(shadow.values()))


class CheckpointShadow:
    """The checkpoint's own tensors, kept on the device or on the host; `apply` has vLLM load them in place."""

    def __init__(self, runner: GPUModelRunner, device: torch.device, *, on_host: bool) -> None:
        self._runner, self._device = runner, device
        self.kept_on = torch.device("cpu") if on_host else device
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._tensors = {}

    def add(self, tensors: Weights) -> None:
        self._tensors.update((name, tensor.to(self.kept_on, copy=True)) for name, tensor in tensors)

    def finish(self) -> None:
        if not self._tensors:
            raise ValueError("no tensors came")

    def apply(self) -> None:
        self._load(self._tensors.items())
        self._tensors = {}

    def rehearse(self, checkpoint: Weights) -> list[str]:
        model = self._runner.get_model()
        before = _digests(model)
        self._load(checkpoint)
        return [name for name, digest in _digests(model).items() if before.get(name) != digest]

    def _load(self, tensors: Weights) -> None:
        missing = reload_weights(self._runner, tensors)
        if self._device.type == "cpu":
            _pack_again(self._runner.get_model())
        if missing:
            raise ValueError(f"{len(missing)} parameters got no weights, first {missing[0]!r}")


def build_shadow(worker: WorkerBase, *, in_place: bool = False, leave_bytes: int = HEADROOM_BYTES) -> WorkerShadow:
    """`in_place`: only one that loads in place, as `tested_shadow` found.

    A shadow that would not leave `leave_bytes` of the device free is kept on the host: versions then land slower, in a
    longer pause.
    """
    runner, device = worker.model_runner, torch.device(worker.device)
    live = runner.get_model()
    if device.type != "cuda":
        return CheckpointShadow(runner, device, on_host=True)
    needed = weight_bytes(live)
    gc.collect()
    torch.cuda.empty_cache()  # what a shadow before this one held
    free_bytes, _ = torch.cuda.mem_get_info(device)
    on_host = needed + leave_bytes > free_bytes
    if on_host:
        logger.warning(
            "{:.2f} GiB are free on {}, and a second copy of the weights takes {:.2f}, beside {:.2f} that must stay"
            " free: versions are kept on the host, and loaded in the pause; lower inference.gpu_memory_utilization, or"
            " raise inference.tensor_parallel_size, to have them on the GPU",
            free_bytes / GIB, device, needed / GIB, leave_bytes / GIB,
        )  # fmt: skip
    if in_place or on_host:
        return CheckpointShadow(runner, device, on_host=on_host)
    try:
        return ParameterShadow(live, worker.vllm_config, device)
    except ValueError:  # quantised, for one
        return CheckpointShadow(runner, device, on_host=False)


def weight_bytes(live: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in live.parameters())


def bytes_to_come(shadow: WorkerShadow, live: nn.Module) -> int:
    """Memory of the device that versions will take beyond the shadow: two portions on their way.

    A shadow that loads in place keeps all of them on the device.
    """
    on_device = isinstance(shadow, CheckpointShadow) and shadow.kept_on.type == "cuda"
    largest = max((parameter.numel() * parameter.element_size() for parameter in live.parameters()), default=0)
    return 2 * max(PORTION_BYTES, largest) + (weight_bytes(live) if on_device else 0)


def tested_shadow(worker: WorkerBase, shadow: WorkerShadow) -> tuple[WorkerShadow, bool]:
    """The shadow for a worker, and whether it must load versions in place.

    Raises RuntimeError when no shadow makes the live weights out of their checkpoint; the live weights are wrong then.
    """
    live = worker.model_runner.get_model()
    if not _may_rearrange(live):
        return shadow, False
    loader = get_model_loader(worker.vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        logger.warning("there is no checkpoint to try weight versions with (vLLM's load_format)")
        return shadow, False
    model_config = worker.vllm_config.model_config
    rearranged = False
    if isinstance(shadow, ParameterShadow):
        changed = shadow.rehearse(loader.get_all_weights(model_config, live))
        if not changed:
            return shadow, False
        rearranged = True
        logger.info("vLLM rearranged {} weights, first {}: versions are loaded in the pause", len(changed), changed[0])
        del shadow  # its memory is for the next one
        shadow = build_shadow(worker, in_place=True)
    changed = shadow.rehearse(loader.get_all_weights(model_config, live))
    if changed:
        raise RuntimeError(
            f"{len(changed)} parameters that it loads anew come out otherwise, first {changed[0]!r}; "
            "use another release of vLLM, other kernels ([inference.vllm] moe_backend), or the embedded engine"
        )
    return shadow, rearranged


def _may_rearrange(model: nn.Module) -> bool:
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return any(isinstance(method, QuantizeMethodBase) and not isinstance(method, plain) for method in methods)


def _digests(model: nn.Module) -> dict[str, bytes]:
    return {name: digest_bytes(sum128(p.detach().contiguous())) for name, p in model.named_parameters()}


def _pack_again(model: nn.Module) -> None:
    for module in model.modules():
        # A head that shares its weights with the embedding is not loaded, so it would keep its packed copy.
        if isinstance(module, ParallelLMHead) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
        # Experts are packed only the first time (vLLM 0.32).
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _config_of_its_own(vllm_config: VllmConfig) -> VllmConfig:
    """With a register of layers of its own, which a second instance must not share."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    return config
