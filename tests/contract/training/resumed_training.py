"""Trains small models on one stream of batches, from a checkpoint or to one; a program, alone or as a rank of torchrun.

    python resumed_training.py MODEL RESULT.json '{"name": {part of a training}, ...}'

A part has `settings` of the model section, the `folder` of its checkpoints, the step to resume `at`, the last step `to`
train, the steps to `save` after, and whether to save `in_background`. One that is `alone` is trained by rank 0 without
a group. Rank 0 writes, for each name, the numbers of every step and digests of the state after loading, at each save,
and at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from meshrl.core.heap import loading

with loading():
    import torch
    import torch.distributed as dist

    import checkpoint_kit as kit
    from meshrl.training.checkpoints.checkpointer import Checkpointer
    from meshrl.training.parallel.rank_group import RankGroup
    from meshrl.wire.saved_steps import steps_in


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """What only identical bits have in common."""
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16] for name, tensor in tensors.items()
    }


def run_part(part: dict[str, Any], model: str) -> dict[str, Any]:
    """One part of a training; what it found can be written as JSON."""
    parallel = RankGroup()
    if not part.get("alone"):
        dp_replicate = part["settings"].get("dp_replicate", 1)
        parallel = RankGroup.start(os.environ, device=torch.device("cpu"), dp_replicate=dp_replicate)
    trained = kit.build(model, part["settings"], parallel=parallel)
    checkpointer = Checkpointer(*trained, Path(part["folder"]), tokenizer=None, seed=3)
    loaded: dict[str, str] = {}
    if "at" in part:
        checkpointer.restore(part["at"])
        loaded = digests(kit.state(trained))
    steps, saved = [], {}
    for stop in sorted({*part.get("save", []), part["to"]}):
        steps += kit.train(trained, stop)
        if stop in part.get("save", []):
            saved[str(stop)] = digests(kit.state(trained))
            checkpointer.progress.samples = 100 * stop
            checkpointer.save(in_background=bool(part.get("in_background")))
    checkpointer.wait_for_save()
    return {
        "steps": steps,
        "loaded": loaded,
        "saved": saved,
        "final": digests(kit.state(trained)),
        "samples": checkpointer.progress.samples,
        "on_disk": steps_in(Path(part["folder"]) / "checkpoints"),
    }


def main() -> None:
    model, result, wanted = sys.argv[1:]
    torch.set_num_threads(1)
    first = os.environ.get("RANK", "0") == "0"
    parts = {name: part for name, part in json.loads(wanted).items() if first or not part.get("alone")}
    done = {name: run_part(part, model) for name, part in parts.items()}
    if first:
        Path(result).write_text(json.dumps(done))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
