"""Starts vLLM from the configuration of `inference`, with an engine in front of it or, headless, none."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from loguru import logger
from transformers import PreTrainedModel

from meshrl.core.config.shared import ModelConfig
from meshrl.core.heap import loading
from meshrl.core.program import draining_signals
from meshrl.core.telemetry.start import Phase, Start
from meshrl.inference.compiled import bring, folder_of, share
from meshrl.inference.config import InferenceConfig
from meshrl.inference.sizing import auto_length
from meshrl.inference.vllm.arguments import automatic, engine_arguments, engine_config, layers_beside_experts
from meshrl.inference.vllm.installed import (
    VllmError,
    check_heads,
    compiled_by,
    inspect_models_here,
    replace,
    start_processes_by,
)
from meshrl.inference.vllm.processes import ForkServer, imports_ahead, prepare_environment
from meshrl.models.families import positions_grow_beyond
from meshrl.models.folder import ModelFolder, WeightReader
from meshrl.models.load import empty_model, eos_token_ids, model_shape, resolve_dtype
from meshrl.models.routers import Routers
from meshrl.wire.values import JsonObject

if TYPE_CHECKING:  # vLLM is an extra, and takes seconds to import
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from meshrl.inference.vllm.engine import VllmEngine
    from meshrl.inference.vllm.requests import RoutedLayers


async def open_vllm_engine(config: InferenceConfig, start: Start, meanwhile: Callable[[], object]) -> VllmEngine:
    """A running `VllmEngine`. Raises VllmError (a ValueError) for arguments that vLLM refuses, and ModelError.

    `meanwhile`: as of `open_engine`. No thread of such work is in this process while it is forked.
    """
    with start.phase("vllm.configuration"), loading():
        vllm_config = await asyncio.to_thread(
            _vllm_config,
            config.model,
            config.vllm_arguments(),
            torch_threads=config.torch_threads,
            versions=config.takes_whole_versions,
        )
        from meshrl.inference.vllm.adapters import AdapterStore
        from meshrl.inference.vllm.engine import VllmEngine

    forks = vllm_config.device_config.device_type == "cpu" and config.torch_threads == 1
    outline, eos_token_ids = await asyncio.to_thread(
        describe,
        config.model,
        vllm_config.model_config.dtype,
        max_model_len=vllm_config.model_config.max_model_len,
        as_trainers=config.loads_as_trainers,
    )
    lora = vllm_config.lora_config
    routed = None
    if config.vllm_argument("enable_return_routed_experts"):
        routed = await asyncio.to_thread(_routed, config.model)
    facts = compiled_by(vllm_config)
    folder = None if facts is None else await asyncio.to_thread(folder_of, facts)
    shared = folder if config.share_compiled else None
    if shared is not None:
        with start.phase("vllm.compiled"):
            await bring(shared, config.weight_broadcast)
    if not forks:
        meanwhile()
    with start.phase("vllm.processes"):
        llm = await asyncio.to_thread(_start, vllm_config, forks=forks)
    if forks:
        meanwhile()
    engine = VllmEngine(
        llm,
        outline=outline,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        eos_token_ids=eos_token_ids,
        max_queue=config.max_queue,
        store=None if lora is None else AdapterStore(lora.max_lora_rank),
        version=0 if config.weight_broadcast is None else None,
        routed=routed,
    )
    try:
        with start.phase("vllm.second_copy"):
            phases = await engine.start()
        start.phases += [Phase(f"vllm.{name}", began_s, ended_s) for name, began_s, ended_s in phases]
    except BaseException:  # whatever it was, vLLM's processes must not outlive it
        await engine.close()
        raise
    if shared is not None:
        engine.sharing = asyncio.create_task(share(shared, config.weight_broadcast))
    return engine


def run_headless(config: InferenceConfig) -> None:
    """Runs this node's copies of the model, with the front end on another node, until that ends."""
    vllm_config = _vllm_config(
        config.model,
        config.vllm_arguments(),
        torch_threads=config.torch_threads,
        versions=config.takes_whole_versions,
        headless=True,
    )
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    parallel = vllm_config.parallel_config
    address = f"tcp://{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}"
    logger.info(
        "{} data-parallel part(s) of the engine at {}, from rank {}",
        parallel.data_parallel_size_local, address, parallel.data_parallel_rank,
    )  # fmt: skip
    manager = CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=vllm_config,
        local_client=False,
        handshake_address=address,
        executor_class=Executor.get_class(vllm_config),
        log_stats=False,
    )
    try:
        manager.monitor_engine_liveness()
    finally:
        manager.shutdown()


def _vllm_config(
    model: ModelConfig,
    arguments: JsonObject,
    *,
    torch_threads: int | None,
    versions: bool,
    headless: bool = False,
) -> VllmConfig:
    prepare_environment(torch_threads)
    if arguments.get("enforce_eager") and not torch.accelerator.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles a few functions on a CPU even then
    # vLLM's own default is one seed for all: engines would answer the same prompt with the same replies.
    given = {"seed": secrets.randbelow(2**31), **arguments}
    if given["dtype"] == "auto":  # vLLM's own rule is not the trainer's
        given["dtype"] = str(resolve_dtype(model)).removeprefix("torch.")
    if given["max_model_len"] == "auto":
        given["max_model_len"] = auto_length(model_shape(model).get_text_config())
    if given.get("enable_lora"):
        layers = layers_beside_experts(empty_model(model, dtype=torch.bfloat16))
        given = {"lora_target_modules": layers, **given}
    chosen = {**automatic(model, given, versions=versions), **given}
    inspect_models_here()
    if imports_ahead():
        start_processes_by(ForkServer())
    vllm_config = engine_config(engine_arguments(chosen, torch_threads=torch_threads), headless=headless)
    check_heads(vllm_config.model_config)
    return vllm_config


def _start(vllm_config: VllmConfig, *, forks: bool) -> AsyncLLM:
    """Starts vLLM's processes; with `forks` out of this one, so that none of them imports vLLM again.

    Only processes with one thread of torch and no GPU may be forked: in the new one OpenMP would wait for ever for
    threads of the old one.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    from meshrl.inference.vllm.whole_completions import coordinate

    replace(DPCoordinatorProc, "run_coordinator", staticmethod(coordinate))
    if forks:
        torch.set_num_threads(1)  # of this thread, which is the main one of the new process
        os.register_at_fork(after_in_child=_forget_signals)
        start_processes_by(multiprocessing.get_context("fork"))
    try:
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
    except (RuntimeError, ValueError) as error:  # of its engine process, which has written its own to the log
        raise VllmError(f"vLLM did not start: {error}; the cause is in its own lines of the log above") from error


def _forget_signals() -> None:
    """In a forked process: its signals are not for this program's event loop."""
    signal.set_wakeup_fd(-1)
    for signum in draining_signals():
        signal.signal(signum, signal.SIG_DFL)


def _routed(model: ModelConfig) -> RoutedLayers:
    from meshrl.inference.vllm.requests import RoutedLayers

    routers = Routers(empty_model(model, dtype=torch.bfloat16))
    if routers.shape is None:
        raise VllmError("inference.enable_return_routed_experts is set, but this model has no experts; leave it out")
    return RoutedLayers(layers=tuple(routers.layers), experts=routers.shape.experts)


def describe(
    model: ModelConfig, dtype: torch.dtype, *, max_model_len: int, as_trainers: bool
) -> tuple[PreTrainedModel, tuple[int, ...]]:
    """The model without storage, and the tokens that end a completion.

    `as_trainers`: its folder must be one that the trainers take. Raises ModelError.
    """
    skeleton = empty_model(model, dtype=dtype)
    if as_trainers:
        WeightReader(ModelFolder.find(model), skeleton)
    limit = positions_grow_beyond(skeleton.config.get_text_config())
    if limit is not None and max_model_len > limit:
        logger.warning(
            "the rotary embeddings of {} are others for sequences of more than {} tokens. With max_model_len {} vLLM"
            " has those for every sequence, a trainer by the length of each: logprobs of shorter ones differ. Set"
            " inference.max_model_len to {} if that is enough",
            model.name, limit, max_model_len, limit,
        )  # fmt: skip
    return skeleton, eos_token_ids(skeleton)
