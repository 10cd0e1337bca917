"""The `inference` program with a fault in it: while the file of FAULT exists, a swap lands weights at stale indices.

The bytes are right, and so are their digests; layer 0 computes with the weights of layer 1, and the other way round.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.inference.main import main

FAULT = "MESHRL_TEST_FAULT"
FIRST, SECOND = ".layers.0.", ".layers.1."


def is_faulty() -> bool:
    return Path(os.environ[FAULT]).exists()


def misplaced(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors, under the names of the other layer."""
    return {
        name.replace(FIRST, SECOND) if FIRST in name else name.replace(SECOND, FIRST): tensor
        for name, tensor in tensors.items()
    }


def break_embedded() -> None:
    from meshrl.inference.embedded import staging

    class StaleWeights(staging.LiveWeights):
        def swap(self, shadow: staging.Shadow) -> None:
            tensors = misplaced(shadow.tensors) if is_faulty() else shadow.tensors
            super().swap(staging.Shadow(version=shadow.version, tensors=tensors))

    staging.LiveWeights = StaleWeights  # type: ignore[misc]  # before the engine takes it


def break_vllm() -> None:
    """In this process, which vLLM's own are forked from."""
    from meshrl.inference.vllm import shadow

    load = shadow.CheckpointShadow._load

    def stale(self: shadow.CheckpointShadow, tensors: shadow.Weights) -> None:
        load(self, misplaced(dict(tensors)).items() if is_faulty() else tensors)

    shadow.CheckpointShadow._load = stale  # type: ignore[method-assign]


if __name__ == "__main__":
    break_embedded()
    if importlib.util.find_spec("vllm") is not None:
        break_vllm()
    main()
