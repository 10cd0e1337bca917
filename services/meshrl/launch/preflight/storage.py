"""Is the checkpoint to resume from there, and is there room for checkpoints, and for versions on their way?"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshrl.core.paths import Layout
from meshrl.core.private_folders import SHM, SHM_VERSIONS
from meshrl.launch.preflight.findings import Finding, Plan, error, note, warning
from meshrl.launch.preflight.models import ModelSize, local_folder, stored_size
from meshrl.machine.fitness import room_of
from meshrl.training.config import CheckpointConfig
from meshrl.wire.saved_steps import steps_in

MASTER_BYTES = 4
"""Of a parameter in a checkpoint: float32."""

STATE_BYTES = {"adamw": 8, "muon": 8, "sgd": 4}
"""Of a parameter's optimizer state in a checkpoint, at most."""


def check_resume_step(plan: Plan) -> Iterator[Finding]:
    ckpt = plan.config.trainer.ckpt
    if ckpt is None or ckpt.resume_step is None or not plan.config.starts("trainer"):
        return
    if plan.config.clean_output_dir:
        yield error(
            f"ckpt.resume_step is {ckpt.resume_step}, but clean_output_dir deletes the checkpoints; leave one of them"
            " out"
        )
        return
    folder = Layout(plan.config.output_dir).checkpoints
    steps = steps_in(folder, "trainer")
    if ckpt.resume_step in steps or (ckpt.resume_step == -1 and steps):
        at, most = (max(steps) if ckpt.resume_step == -1 else ckpt.resume_step), plan.config.trainer.max_steps
        if most is not None and at >= most:
            yield warning(
                f"the run resumes at step {at} and max_steps is {most}, so nothing is trained; max_steps counts from"
                " the first step of all"
            )
        return
    there = f"steps {steps}; set it to one of them, or" if steps else "no checkpoint;"
    yield error(f"ckpt.resume_step is {ckpt.resume_step}, but {folder} holds {there} leave it out to start afresh")


def check_disk(plan: Plan) -> Iterator[Finding]:
    config, size = plan.config, _size(plan)
    if size is None or config.trainer.ckpt is None:
        return
    lora = config.trainer.model.lora is not None
    state = 0 if lora else size.num_params * (MASTER_BYTES + STATE_BYTES.get(config.trainer.optim.type, 8))
    one = version_bytes(plan, size) + (0 if config.trainer.ckpt.weights_only else state)
    count = checkpoint_count(config.trainer.ckpt, config.trainer.max_steps)
    free = room_of(config.output_dir)[1]
    where = f"output_dir {str(config.output_dir)!r} has {_gib(free)} free"
    if free < one:
        yield error(
            f"{where}, but a checkpoint of this model takes about {_gib(one)}; choose a larger disk, or no ckpt"
        )
    elif count is not None and free < count * one:
        yield warning(
            f"{where}, but {count} checkpoints of about {_gib(one)} each take {_gib(count * one)}; set ckpt.keep_last"
            f" to {max(1, free // one - 1)} or less, or choose a larger disk"
        )


def check_versions(plan: Plan) -> Iterator[Finding]:
    config, size = plan.config, _size(plan)
    broadcast = config.trainer.weight_broadcast
    if size is None or broadcast.type not in ("auto", "filesystem"):
        return
    if config.trainer.model.lora is not None and broadcast.lora_adapter_only:
        return
    needed = SHM_VERSIONS * version_bytes(plan, size)
    takes = f"{SHM_VERSIONS} versions of the weights take {_gib(needed)}"
    if broadcast.broadcast_dir is not None:
        free = room_of(Path(broadcast.broadcast_dir))[1]
        if free < needed:
            yield error(
                f"weight_broadcast.broadcast_dir {broadcast.broadcast_dir!r} has {_gib(free)} free, but {takes}; choose"
                " a larger disk, or leave it out"
            )
        return
    in_memory = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    if in_memory >= needed:
        return
    free = room_of(config.output_dir)[1]
    if free < needed:
        yield error(
            f"weight_broadcast.type is {broadcast.type!r}, but {takes}, and {SHM} has {_gib(in_memory)} free,"
            f" output_dir {_gib(free)}; make room, or set weights.transport to 'stream'"
        )
    else:
        yield note(f"{SHM} has {_gib(in_memory)} free, but {takes}: they are written to output_dir, which is slower")


def checkpoint_count(ckpt: CheckpointConfig, max_steps: int | None) -> int | None:
    if ckpt.interval is None:
        return 1
    count = None if max_steps is None else max(1, math.ceil(max_steps / ckpt.interval))
    if ckpt.keep_last is None or ckpt.keep_interval is not None:
        return count
    return min(ckpt.keep_last + 1, count or ckpt.keep_last + 1)  # the next is whole before the oldest goes


def version_bytes(plan: Plan, size: ModelSize) -> int:
    """Bytes of the weights as they are published and saved."""
    dtype = plan.config.trainer.model.dtype
    if dtype == "float32" or (dtype == "auto" and not plan.gpus):  # auto is float32 on a CPU
        return 4 * size.num_params
    return 2 * size.num_params if dtype == "bfloat16" else size.num_bytes


def _size(plan: Plan) -> ModelSize | None:
    folder = local_folder(plan.config.trainer.model.name) if plan.config.starts("trainer") else None
    return None if folder is None else stored_size(folder)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
