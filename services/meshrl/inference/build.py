"""Chooses an engine, in the interpreter that will run it, and builds it: device, threads, model, cache."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from loguru import logger
from transformers import PreTrainedModel

from meshrl.core.telemetry.start import Start
from meshrl.inference.config import InferenceConfig, only_vllm
from meshrl.inference.embedded.engine import MAX_ADAPTERS, EmbeddedEngine
from meshrl.inference.engine import Engine
from meshrl.inference.sizing import GIB, auto_length
from meshrl.machine.memory import machine_memory
from meshrl.models.load import eos_token_ids, load_model

SLOTS = 128
PREFILL_TOKENS = 2048
CACHE_SHARE = 0.5  # of the memory that model and versions leave free
COST_OF_NO_VLLM = (
    "there is a GPU but no vLLM here, so the embedded engine runs: it decodes at most 128 sequences at once, each in a"
    " slot of max_model_len tokens, through the model's own Python and without CUDA graphs. With vLLM a 0.6B model"
    " gives 55,000 tokens/s on an H200 with 512 sequences in flight, and training waits for it: install it (uv sync"
    " --extra vllm), or name an environment that has it in inference.python; inference.engine = 'embedded' says that"
    " this is meant"
)


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    engine: Literal["embedded", "vllm"]
    reason: str
    cost: str = ""  # a warning about its speed, where `auto` has no better choice


def decide(engine: Literal["auto", "embedded", "vllm"], device: str, *, has_vllm: bool, has_gpu: bool) -> EngineChoice:
    if engine != "auto":
        return EngineChoice(engine=engine, reason="as configured")
    if not has_vllm:
        reason = "vLLM is not installed here (uv sync --extra vllm installs it)"
        slow = has_gpu and not device.startswith("cpu")
        return EngineChoice(engine="embedded", reason=reason, cost=COST_OF_NO_VLLM if slow else "")
    if not has_gpu:
        return EngineChoice(
            engine="embedded", reason="there is no GPU; inference.engine = 'vllm' runs vLLM on a CPU as well"
        )
    if device.startswith("cpu"):
        return EngineChoice(engine="embedded", reason=f"model.device is {device!r}")
    return EngineChoice(engine="vllm", reason="vLLM is installed and there is a GPU")


async def open_engine(
    config: InferenceConfig, start: Start | None = None, *, meanwhile: Callable[[], object] = lambda: None
) -> Engine:
    """The configured engine, started on this loop. `start` gets its phases.

    `meanwhile` is called once, for work beside the start. Raises ModelError when the model cannot be loaded, ValueError
    if a changed configuration would help.
    """
    start = start or Start()
    has_vllm, has_gpu = importlib.util.find_spec("vllm") is not None, torch.cuda.is_available()
    choice = decide(config.engine, config.model.device, has_vllm=has_vllm, has_gpu=has_gpu)
    if choice.cost:
        logger.warning(choice.cost)
    if choice.engine == "embedded" and config.vllm_only:
        raise ValueError(f"{only_vllm(config.vllm_only)} (engine = '{config.engine}': {choice.reason})")
    if config.sleep_while_training and not has_gpu:
        raise ValueError(
            "inference.sleep_while_training needs a GPU: vLLM has no sleep mode on a CPU; leave it out, or run on a"
            " machine with a GPU"
        )
    logger.info("the engine is {}: {}", choice.engine, choice.reason)
    if choice.engine == "vllm":
        from meshrl.inference.vllm.build import open_vllm_engine  # vLLM is an extra, and takes seconds to import

        engine: Engine = await open_vllm_engine(config, start, meanwhile)
        return engine
    meanwhile()
    with start.phase("model"):
        embedded = await asyncio.to_thread(build_engine, config)
    embedded.start()
    return embedded


def build_engine(config: InferenceConfig) -> EmbeddedEngine:
    """Keep it off the event loop. Raises ModelError, and ValueError when the cache bound is below one sequence."""
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    model = load_model(config.model)
    shape = model.config.get_text_config()
    max_model_len = auto_length(shape) if config.max_model_len == "auto" else config.max_model_len
    limit: int | None = getattr(shape, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise ValueError(
            f"max_model_len {max_model_len} is beyond the {limit} positions of {config.model.name}; lower it"
        )
    return EmbeddedEngine(
        model,
        max_model_len=max_model_len,
        num_slots=SLOTS if config.max_num_seqs == "auto" else config.max_num_seqs,
        max_queue=config.max_queue,
        max_num_batched_tokens=config.max_num_batched_tokens or PREFILL_TOKENS,
        kv_cache_bytes=config.kv_cache_bytes or _cache_bytes(model, versions=config.weight_broadcast is not None),
        eos_token_ids=eos_token_ids(model),
        seed=config.seed,
        version=0 if config.weight_broadcast is None else None,
        keep_routes=config.enable_return_routed_experts,
        max_adapters=max(config.max_loras, config.max_cpu_loras or 0, MAX_ADAPTERS),
    )


def _cache_bytes(model: PreTrainedModel, *, versions: bool) -> int:
    shadow = sum(p.nbytes for p in model.parameters()) if versions else 0
    if model.device.type == "cuda":
        free = int(torch.cuda.mem_get_info(model.device)[0])
    elif (memory := machine_memory()) is not None:
        free = memory.available
    else:
        raise ValueError("this system does not report its memory; set inference.kv_cache_bytes")
    if shadow >= free:
        raise ValueError(
            f"{free / GIB:.2f} GiB are free on {model.device} beside the model, and versions come into a second copy"
            f" of its weights, {shadow / GIB:.2f} GiB; take a device with more memory, or a smaller model.name"
        )
    return int(CACHE_SHARE * (free - shadow))
