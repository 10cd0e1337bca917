"""vLLM's GPU worker: the room of a second copy of the weights is taken before the KV cache's.

vLLM gives its KV cache all of the configured share that weights and activations leave. Here the shadow exists when it
measures, and all memory that this process holds on the device counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from vllm import SamplingParams, envs
from vllm.v1.worker.gpu_worker import Worker

from meshrl.core.durable import write_file
from meshrl.inference.sizing import ACTIVATION_BYTES, GIB
from meshrl.inference.vllm.installed import compiled_by, process_bytes, profiled_bytes
from meshrl.inference.vllm.processes import kept_variable
from meshrl.inference.vllm.shadow import HEADROOM_BYTES, build_shadow, bytes_to_come
from meshrl.inference.vllm.worker import WeightsExtension
from meshrl.wire.manifest import digest


class GpuWorker(WeightsExtension, Worker):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """vLLM finds the extension among its bases and mixes nothing in, as it could not into `Worker` once this class
    exists."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Builds the shadow, too, outside the pools that vLLM's sleep mode frees; none for an engine of adapters."""
        with self._meshrl_phase("load"):
            super().load_model(*args, **kwargs)
        if self.vllm_config.lora_config is None:
            self._meshrl_shadow = build_shadow(self, leave_bytes=HEADROOM_BYTES + ACTIVATION_BYTES)

    def determine_available_memory(self) -> int:
        self._meshrl_measure_graphs_once()
        # Its first pass compiles the model. vLLM moves Triton's folder then, but not where it finds a compiled model:
        # the next start would look for the kernels of later phases in another folder, and compile them anew.
        with self._meshrl_phase("compile"), kept_variable("TRITON_CACHE_DIR"):
            offered = int(super().determine_available_memory())
        if self.cache_config.kv_cache_memory_bytes or self._meshrl_shadow is None:
            return offered
        gc.collect()
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        held = process_bytes(self.device) or self.init_snapshot.free_memory - free_bytes
        to_come = profiled_bytes(self) + bytes_to_come(self._meshrl_shadow, self.model_runner.get_model())
        within_share, there = int(self.requested_memory) - held, free_bytes - HEADROOM_BYTES
        room = min(within_share, there) - to_come
        logger.info(
            "this process holds {:.2f} GiB of {}, its second copy of the weights included; steps and versions on their"
            " way take {:.2f} more; {:.2f} of its {:.2f} GiB are left for the KV cache, {:.2f} of the device are free",
            held / GIB, self.device, to_come / GIB, room / GIB, self.requested_memory / GIB, free_bytes / GIB,
        )  # fmt: skip
        if room <= 0:
            raise ValueError(
                f"nothing is left for the KV cache on {self.device}: weights, their second copy and a step take"
                f" {(held + to_come) / GIB:.2f} GiB, {self.requested_memory / GIB:.2f} GiB are this engine's share, and"
                f" {free_bytes / GIB:.2f} GiB are free; raise inference.gpu_memory_utilization, or split the model over"
                " more GPUs (inference.tensor_parallel_size)"
            )
        self.available_kv_cache_memory_bytes = room
        return room

    def _meshrl_measure_graphs_once(self) -> None:
        """Later starts of a configuration take the bytes of its CUDA graphs from the first one.

        vLLM 0.32 captures a graph of every size for that number alone. Workers that capture together must all measure,
        or none.
        """
        config, runner = self.vllm_config, self.model_runner
        facts, graphs = compiled_by(config), config.compilation_config
        if facts is None or config.parallel_config.world_size * config.parallel_config.data_parallel_size > 1:
            return
        of_graphs = (str(graphs.cudagraph_mode), graphs.cudagraph_capture_sizes, config.model_config.max_model_len)
        kept = Path(envs.VLLM_CACHE_ROOT) / f"meshrl-graphs-{digest(repr((facts, of_graphs)).encode()).hex()}"
        measure = runner.profile_cudagraph_memory

        def measured() -> int:
            with suppress(OSError, ValueError):
                return int(kept.read_text())
            found = int(measure())
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_file(kept, str(found))
            except OSError as error:
                logger.warning("the next start measures its CUDA graphs anew: {}", error)
            return found

        runner.profile_cudagraph_memory = measured

    def compile_or_warm_up_model(self) -> Any:
        with self._meshrl_phase("graphs"), _usual_sampling_alone():
            return super().compile_or_warm_up_model()

    @contextmanager
    def _meshrl_phase(self, name: str) -> Iterator[None]:
        began_s = time.time()
        yield
        self._meshrl_phases = (*self._meshrl_phases, (name, began_s, time.time()))


@contextmanager
def _usual_sampling_alone() -> Iterator[None]:
    """vLLM compiles the kernels of all kinds of sampling before it serves. Here those of penalties, top_k and the like
    are compiled for the first request with them: a start takes ten seconds less."""
    every = SamplingParams.for_sampler_warmup
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=0.9, logprobs=0))
    try:
        yield
    finally:
        SamplingParams.for_sampler_warmup = staticmethod(every)
