"""Turns the configuration into vLLM's engine arguments, checked against the installed vLLM."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from loguru import logger
from torch import nn
from transformers import PreTrainedModel

from meshrl.core.config.shared import ModelConfig
from meshrl.inference.engine import MAX_ALTERNATIVES
from meshrl.inference.sizing import CPU_SLOTS, GIB, engine_size, fits, graph_sizes, shape_of
from meshrl.inference.vllm.installed import VllmError, check_supported, require
from meshrl.models.experts import expert_layers
from meshrl.models.load import empty_model
from meshrl.wire.values import JsonObject

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

WORKER_EXTENSION = "meshrl.inference.vllm.worker.WeightsExtension"
GPU_WORKER = "meshrl.inference.vllm.gpu_worker.GpuWorker"
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

# Ours to set: the engine relies on them.
RESERVED: Mapping[str, str] = {
    "worker_extension_cls": "the weight updates live there",
    "scheduler_cls": "whole completions and version spans come from it",
    "logprobs_mode": "importance ratios need the logprobs of the distribution sampled from",
    "weight_transfer_config": "weights come through the weight hub",
}


def engine_arguments(given: JsonObject, *, torch_threads: int | None = None) -> AsyncEngineArgs:
    """For that many threads on a CPU (None: vLLM's own choice). Raises VllmError naming every key that is wrong."""
    check_supported()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    problems = [f"{key}: set by meshrl itself, since {RESERVED[key]}; leave it out" for key in given if key in RESERVED]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            problems.append(f"{key}: no such engine argument{f'; did you mean {near[0]}?' if near else ''}")
    if problems:
        raise VllmError("inference.vllm: " + "; ".join(problems))
    values = {
        **_on_this_device(given, torch_threads),
        "skip_tokenizer_init": True,  # text routes have their own tokenizer, and engines speak token ids
        "disable_log_stats": True,
        "max_logprobs": MAX_ALTERNATIVES,
        **({"worker_cls": GPU_WORKER} if current_platform.is_cuda_alike() else {}),
        **(_graphs(given) if current_platform.is_cuda_alike() else {}),
        **given,
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
    }
    try:
        return AsyncEngineArgs(**values)
    except (TypeError, ValueError) as error:
        raise VllmError(f"inference.vllm: {error}") from error


def automatic(model_config: ModelConfig, given: JsonObject, *, versions: bool) -> dict[str, bool | int | float]:
    """What `given` lacks of slots, tokens a step and share of memory, for the model and the present device. Raises
    ModelError."""
    check_supported()
    from vllm.platforms import current_platform

    if not {"max_num_seqs", "gpu_memory_utilization"} - given.keys():
        return {}
    if current_platform.is_cpu():
        logger.info("max_num_seqs is {} on a CPU", given.get("max_num_seqs", CPU_SLOTS))
        return {"max_num_seqs": CPU_SLOTS}
    model = empty_model(model_config, dtype=torch.bfloat16)
    shape = shape_of(
        model.config.get_text_config(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes_per_value=4 if model_config.dtype == "float32" else 2,
    )
    gpus = int(given.get("tensor_parallel_size", 1)) * int(given.get("pipeline_parallel_size", 1))
    memory = int(current_platform.get_device_total_memory())
    if versions and not fits(shape, gpu_bytes=memory, gpus=gpus):
        logger.warning(
            "weights and the second copy that versions come into need {:.0f} GiB on each of {} GPU(s) of {:.0f} GiB;"
            " set inference.tensor_parallel_size to split the model over more",
            2 * shape.weight_bytes(gpus) / GIB, gpus, memory / GIB,
        )  # fmt: skip
    size = engine_size(
        shape,
        gpu_bytes=memory,
        max_model_len=given["max_model_len"],
        gpus=gpus,
        versions=versions,
        share=given.get("gpu_memory_utilization"),
    )
    whole_prompts = given["max_model_len"] if given.get("enable_chunked_prefill") is False else 1
    batched = int(given.get("max_num_batched_tokens", max(size.max_num_batched_tokens, whole_prompts)))
    slots = int(given.get("max_num_seqs", min(size.max_num_seqs, batched)))
    chosen = {
        "max_num_seqs": slots,
        "max_num_batched_tokens": max(batched, slots),
        "gpu_memory_utilization": size.gpu_memory_utilization,
    }
    listed = ", ".join(f"{key} = {value}" for key, value in chosen.items() if key not in given)
    logger.info("chosen for this GPU and model: {} ({}); set them to have others", listed, size.reason)
    return chosen


def layers_beside_experts(model: PreTrainedModel) -> list[str] | None:
    """Names of the layers outside a mixture's experts; None for a model without experts.

    vLLM computes an adapter in every layer that could have one. In the experts of 30B-A3B that is most of a step, and
    `AdapterStore` refuses theirs.
    """
    within = {part for experts in expert_layers(model, model.config) for part in experts.module.modules()}
    if not within:
        return None
    linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer not in within)
    return sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"})


def _graphs(given: JsonObject) -> dict[str, list[int]]:
    chosen = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "speculative_config"}
    if chosen & given.keys() or not (slots := given.get("max_num_seqs")):
        return {}
    return {"cudagraph_capture_sizes": graph_sizes(int(slots))}


def _on_this_device(given: JsonObject, torch_threads: int | None) -> dict[str, bool | str]:
    from vllm.platforms import current_platform

    one_worker = given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1) == 1
    if not current_platform.is_cpu():
        # A small model waits for Python: with an interpreter each, scheduler and worker of 0.6B at 1,024 slots sampled
        # 41,927 tokens/s on an H100, and 32,692 in one.
        return {"distributed_executor_backend": "mp"} if one_worker and current_platform.is_cuda_alike() else {}
    # vLLM 0.32 cannot give a generator its place back on a CPU, which a seeded prompt in several pieces needs.
    values: dict[str, bool | str] = {"enable_chunked_prefill": False}
    if torch_threads is None:
        return values
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") != "nobind":
        raise VllmError(
            "inference.torch_threads and VLLM_CPU_OMP_THREADS_BIND both say which threads vLLM has; leave one out"
        )
    if one_worker:
        # A worker in a process of its own and the scheduler wait for each other in busy loops, which take two cores
        # whole. vLLM changes plain "uni" back into that, so that it can bind threads; here the threads are given.
        values["distributed_executor_backend"] = _IN_PROCESS
    return values


def engine_config(arguments: AsyncEngineArgs, *, headless: bool = False) -> VllmConfig:
    """With the scheduler that hands over whole completions. Raises VllmError."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.core.sched.scheduler import Scheduler

    from meshrl.inference.vllm.whole_completions import PROBE_SEATS

    require(Scheduler, "_preempt_request", "set_pause_state")  # ours count preemptions and the ends of pauses
    try:
        config = arguments.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT, headless=headless)
    except (ValueError, RuntimeError, OSError) as error:
        raise VllmError(f"vLLM refuses its arguments: {error}") from error
    asynchronous = bool(config.scheduler_config.async_scheduling)
    name = "OverlappedScheduler" if asynchronous else "SerialScheduler"
    config.scheduler_config.scheduler_cls = f"meshrl.inference.vllm.whole_completions.{name}"
    config.scheduler_config.max_num_seqs += PROBE_SEATS
    return config
