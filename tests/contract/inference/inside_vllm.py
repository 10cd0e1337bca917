"""A program for an interpreter that has vLLM: prints what it finds inside of it as JSON, in its last line."""

from __future__ import annotations

import gc
import itertools
import json
import sys
from types import SimpleNamespace

from vllm import envs
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

import scheduler_pair
from meshrl.inference.config import InferenceConfig
from meshrl.inference.vllm.arguments import engine_arguments
from meshrl.inference.vllm.build import _vllm_config
from meshrl.inference.vllm.installed import VllmError
from meshrl.inference.vllm.requests import _from_flat

PLACES = [([7, 7, 4], [-0.1, -0.1, -2.0], 1), ([5, 6, 5], [-1.5, -0.3, -1.5], 2), ([9, 6, 5], [-4.0, -0.3, -1.5], 8)]


def logprobs_of_a_stream() -> list[list[list[list[float]]]]:
    """Logprobs and two alternatives of three tokens, in one piece and of three pieces that vLLM joined."""

    def piece(*places: tuple[list[int], list[float], int]) -> FlatLogprobs:
        flat = FlatLogprobs()
        for ids, logprobs, rank in places:
            flat.append_fast(ids, logprobs, iter((rank, 1, 2)), [None] * 3)
        return flat

    joined = piece(PLACES[0])
    for place in PLACES[1:]:
        joined.extend(piece(place))
    return [[part.tolist() for part in _from_flat(flat, 3, 2)] for flat in (piece(*PLACES), joined)]


def left_to_collect() -> list[int]:
    """Objects before the fork server's imports and after them, without those that no collection looks at."""
    counts = [len(gc.get_objects())]
    import meshrl.inference.vllm.preload  # noqa: F401

    return [*counts, len(gc.get_objects())]


def refusal(model: str) -> str:
    """Why an engine of the model is not started."""
    config = InferenceConfig.model_validate({"model": {"name": model}, "max_num_seqs": 8})
    try:
        _vllm_config(config.model, config.vllm_arguments(), torch_threads=None, versions=False)
    except VllmError as error:
        return str(error)
    return ""


def graphs_measured(folder: str) -> list[list[int]]:
    """What two starts of a worker with CUDA graphs of each list of sizes take them to need, where each measurement
    would find another number of bytes."""
    from vllm.v1.worker import gpu_worker

    from meshrl.inference.vllm.gpu_worker import GpuWorker

    envs.VLLM_CACHE_ROOT = folder
    bytes_found = itertools.count(100)
    gpu_worker.Worker.determine_available_memory = lambda worker: worker.model_runner.profile_cudagraph_memory()

    def start(sizes: list[int], copies: int) -> int:
        worker = object.__new__(GpuWorker)
        worker.model_runner = SimpleNamespace(profile_cudagraph_memory=lambda: next(bytes_found))
        worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=1)
        worker.vllm_config = SimpleNamespace(
            compute_hash=lambda: "hash",
            compilation_config=SimpleNamespace(cudagraph_mode="FULL", cudagraph_capture_sizes=sizes),
            model_config=SimpleNamespace(max_model_len=64, enforce_eager=False),
            parallel_config=SimpleNamespace(world_size=1, data_parallel_size=copies),
        )
        return int(worker.determine_available_memory())

    return [[start(sizes, copies) for _ in range(2)] for sizes, copies in (([1, 2], 1), ([1, 2, 4], 1), ([1, 2], 2))]


def sampling_compiled_first() -> list[list[float]]:
    """Penalty, top_k and logprobs of the requests with which vLLM has kernels compiled in a worker's start, and after
    it."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import warmup

    from meshrl.inference.vllm.gpu_worker import GpuWorker

    def given(worker: object = None) -> list[float]:
        params = warmup.SamplingParams.for_sampler_warmup()
        return [params.frequency_penalty, params.top_k, params.logprobs]

    gpu_worker.Worker.compile_or_warm_up_model = given
    return [object.__new__(GpuWorker).compile_or_warm_up_model(), given()]


def workers_of_a_gpu() -> list[str]:
    """Where an engine's worker class on a GPU has its part for weights from, as vLLM mixes it; no GPU is used."""
    type(current_platform).is_cuda_alike = lambda platform: True
    found = []
    for given in ({}, {"enable_lora": True}):
        arguments = engine_arguments({"model": "any", "max_num_seqs": 8, **given})
        name = arguments.worker_cls if arguments.worker_cls != "auto" else "vllm.v1.worker.gpu_worker.Worker"
        worker, extension = map(resolve_obj_by_qualname, (name, arguments.worker_extension_cls))
        if extension not in worker.__bases__:  # vllm.v1.worker.worker_base, init_worker
            worker.__bases__ = (*worker.__bases__, extension)
        found.append(worker.meshrl_open.__qualname__)
    return found


if __name__ == "__main__":
    found = {
        "scheduler": scheduler_pair.compare(sys.argv[1]),
        "stream": logprobs_of_a_stream(),
        "left": left_to_collect(),
        "refused": refusal(sys.argv[1]),
        "workers": workers_of_a_gpu(),  # it changes vLLM
        "graphs": graphs_measured(sys.argv[1]),  # after the change
        "sampling": sampling_compiled_first(),
    }
    print(json.dumps(found))
