"""The `inference` program with vLLM on a CPU whose workers keep weights as those on a GPU do, unpacked.

So their shadows are parameters, and each knows where a version's tensors lie in them. Of every version that comes in
parts a worker writes into the folder of RECEIVED what came, and after every swap all that is live.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrl.inference.main import main

RECEIVED = "MESHRL_TEST_RECEIVED"


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Bytes of the largest piece of memory that operations have made of weights or of what travels."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._held = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
        self._types = {torch.uint8, *(tensor.dtype for tensor in parameters.values())}
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in self._types:
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in self._held:
                    self.num_bytes = max(self.num_bytes, memory.nbytes())
        return result


def keep_weights_plain() -> None:
    """In this process, which vLLM's own are forked from."""
    from vllm.model_executor.layers import utils

    from meshrl.inference.vllm import shadow, worker
    from meshrl.versions.collective.broadcasting import Receiver

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def build(of: Any, **_: Any) -> shadow.ParameterShadow:
        return shadow.ParameterShadow(of.model_runner.get_model(), of.vllm_config, torch.device(of.device))

    utils.dispatch_cpu_unquantized_gemm = plain
    worker.build_shadow = build  # type: ignore[assignment]
    receive, apply = Receiver.receive_held, worker.WeightsExtension.meshrl_apply

    def counted(self: Receiver, manifest: Any, parameters: dict[str, torch.Tensor], *, stall_s: float) -> Any:
        with Largest(parameters) as seen:
            times, digests = receive(self, manifest, parameters, stall_s=stall_s)
        note = {"version": manifest.version, "received": times.num_bytes, "largest": seen.num_bytes}
        with (Path(os.environ[RECEIVED]) / f"parts-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        return times, digests

    def noted(self: Any, version: int) -> float:
        seconds = apply(self, version)
        live = dict(self._meshrl_worker.model_runner.get_model().named_parameters())
        path = Path(os.environ[RECEIVED]) / f"live-{version}-{self._meshrl_worker.rank}.safetensors"
        save_file({name: tensor.detach().clone() for name, tensor in live.items()}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        return seconds

    Receiver.receive_held = counted  # type: ignore[method-assign]
    worker.WeightsExtension.meshrl_apply = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    keep_weights_plain()
    main()
