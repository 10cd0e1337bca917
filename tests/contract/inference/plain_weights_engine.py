"""The `inference` program with vLLM on a CPU whose workers keep weights as those on a GPU do, unpacked.

So their shadows are parameters, and each knows where a version's tensors lie in them. Of every version that comes
through a group a worker notes in the folder of RECEIVED what it received, and after every swap it writes all that is
live into the folder of LIVE, if there is one.
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
from patient_workers import sleep_soon

RECEIVED, LIVE = "MESHRL_TEST_RECEIVED", "MESHRL_TEST_LIVE"


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
    from meshrl.versions.collective.broadcasting import Receiver, ReceiveTimes
    from meshrl.versions.placement import PartDigests
    from meshrl.wire.types import Manifest

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def build(of: Any, **_: Any) -> shadow.ParameterShadow:
        return shadow.ParameterShadow(of.model_runner.get_model(), of.vllm_config, torch.device(of.device))

    utils.dispatch_cpu_unquantized_gemm = plain
    worker.build_shadow = build  # type: ignore[assignment]
    receive, receive_held = Receiver.receive, Receiver.receive_held
    apply = worker.WeightsExtension.meshrl_apply

    def note(version: int, times: ReceiveTimes, **more: int) -> None:
        line = json.dumps({"version": version, "received": times.num_bytes, "wire_s": times.wire_s, **more})
        with (Path(os.environ[RECEIVED]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(line + "\n")

    def received(self: Receiver, manifest: Manifest, *args: Any, **how: Any) -> ReceiveTimes:
        times = receive(self, manifest, *args, **how)
        note(manifest.version, times)
        return times

    def received_held(
        self: Receiver, manifest: Manifest, parameters: dict[str, torch.Tensor], **how: Any
    ) -> tuple[ReceiveTimes, PartDigests]:
        with Largest(parameters) as seen:
            times, digests = receive_held(self, manifest, parameters, **how)
        note(manifest.version, times, largest=seen.num_bytes)
        return times, digests

    def applied(self: Any, version: int) -> float:
        seconds = apply(self, version)
        if LIVE in os.environ:
            live = dict(self._meshrl_worker.model_runner.get_model().named_parameters())
            path = Path(os.environ[LIVE]) / f"{version}-{self._meshrl_worker.rank}.safetensors"
            save_file({name: tensor.detach().clone() for name, tensor in live.items()}, path)
        return seconds

    Receiver.receive, Receiver.receive_held = received, received_held  # type: ignore[method-assign,assignment]
    worker.WeightsExtension.meshrl_apply = applied  # type: ignore[method-assign]


if __name__ == "__main__":
    sleep_soon()
    keep_weights_plain()
    main()
