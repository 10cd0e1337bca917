"""The worker class of vLLM's engines on a GPU, as vLLM mixes it; no GPU is used."""

import os
import subprocess
from pathlib import Path

import meshrl.client
import meshrl.core

PROGRAM = """
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

type(current_platform).is_cuda_alike = lambda platform: True
import meshrl.inference.vllm.gpu_worker  # as the fork server does
from meshrl.inference.vllm.arguments import engine_arguments

for given in ({}, {"enable_lora": True}):
    arguments = engine_arguments({"model": "any", "max_num_seqs": 8, **given})
    name = arguments.worker_cls if arguments.worker_cls != "auto" else "vllm.v1.worker.gpu_worker.Worker"
    worker, extension = map(resolve_obj_by_qualname, (name, arguments.worker_extension_cls))
    if extension not in worker.__bases__:  # vllm.v1.worker.worker_base, init_worker
        worker.__bases__ = (*worker.__bases__, extension)
    print(worker.meshrl_open.__qualname__)
"""


def test_engines_of_versions_and_of_adapters_have_a_worker_on_a_gpu(vllm: Path) -> None:
    roots = [str(Path(module.__path__[0]).parent.parent) for module in (meshrl.core, meshrl.client)]
    ran = subprocess.run(
        [vllm, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)}, capture_output=True, text=True
    )
    assert ran.stdout.splitlines()[-2:] == 2 * ["WeightsExtension.meshrl_open"], ran.stderr[-2000:]
