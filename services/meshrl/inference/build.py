"""Builds an engine from its configuration: device, threads, model, cache; used by main, tests and benchmarks."""

from __future__ import annotations

import asyncio

import torch
from loguru import logger
from transformers import PreTrainedModel

from meshrl.client.machine.memory import machine_memory
from meshrl.inference.config import InferenceConfig
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.engine import Engine
from meshrl.inference.engine_choice import choose_engine
from meshrl.inference.sizing import GIB
from meshrl.models.load import eos_token_ids, load_model

SLOTS = 128
PREFILL_TOKENS = 2048
CACHE_SHARE = 0.5  # of the memory that model and versions leave free


async def open_engine(config: InferenceConfig) -> Engine:
    """The engine that the configuration asks for, started on this loop.

    Raises: ModelError when the model cannot be loaded, ValueError for what a changed configuration mends.
    """
    choice = choose_engine(config)
    logger.info("the engine is {}: {}", choice.engine, choice.reason)
    if choice.engine == "vllm":
        from meshrl.inference.vllm.build import open_vllm_engine  # vLLM is an extra, and takes seconds to import

        engine: Engine = await open_vllm_engine(config)
        return engine
    embedded = await asyncio.to_thread(build_engine, config)
    embedded.start()
    return embedded


def build_engine(config: InferenceConfig) -> EmbeddedEngine:
    """Loads the model and allocates the cache; takes seconds, so keep it off the event loop.

    Raises: ModelError when the model cannot be loaded, ValueError when the cache bound holds not one sequence.
    """
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    model = load_model(config.model)
    max_model_len = config.max_model_len
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:  # a default is lowered to what the model can do
        if "max_model_len" in config.model_fields_set:
            raise ValueError(
                f"max_model_len {max_model_len} is beyond the {limit} positions of {config.model.name}; lower it"
            )
        max_model_len = limit
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
    )


def _cache_bytes(model: PreTrainedModel, *, versions: bool) -> int:
    """Half of what is free once a second copy of the weights, into which versions come, has its room."""
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
