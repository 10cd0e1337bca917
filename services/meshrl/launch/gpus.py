"""Chooses the GPUs of each program: those listed, or as many as it needs, engines first."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from meshrl.core.config import ConfigError
from meshrl.core.torch_environment import VISIBLE_GPUS, may_have_gpu


@dataclass(frozen=True, kw_only=True)
class Placement:
    """GPUs as CUDA_VISIBLE_DEVICES names them. None: all that are visible."""

    engines: tuple[tuple[str, ...] | None, ...] = ()
    trainer: tuple[str, ...] | None = None
    hosts: tuple[str, ...] = ()
    """Where each engine listens. Empty: as configured."""

    def shared(self, engine: int) -> bool:
        return bool(set(self.engines[engine] or ()) & set(self.trainer or ()))


@dataclass(frozen=True, kw_only=True)
class GpuDemand:
    """Numbers of GPUs, and those listed, by place among the visible ones."""

    engines: int
    for_engines: int
    for_trainer: int
    num_infer_gpus: int | None = None
    inference_gpu_ids: Sequence[int] | None = None
    trainer_gpu_ids: Sequence[int] | None = None


def visible(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a program started here may use, by CUDA's names."""
    listed = environ.get(VISIBLE_GPUS)
    if listed is not None:
        return tuple(name.strip() for name in listed.split(",") if name.strip() not in ("", "-1"))
    if not may_have_gpu(environ):
        return ()
    return tuple(str(place) for place in range(_count()))


def _count() -> int:
    """As torch, which takes seconds to import: by the driver, and none where torch has no CUDA."""
    installed = find_spec("torch")
    if installed is None or installed.origin is None:
        return 0
    if run_path(str(Path(installed.origin).with_name("version.py")))["cuda"] is None:
        return 0
    try:
        driver, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_int()
        if driver.nvmlInit_v2() == 0 and driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            return count.value
    except (OSError, AttributeError):  # no such library, or one without these calls
        pass
    import torch

    return torch.cuda.device_count()


def place(demand: GpuDemand, gpus: Sequence[str]) -> Placement:
    """Raises ConfigError if the GPUs are too few. Without GPUs lists are taken as they are: preflight refuses them."""
    count = demand.engines
    if not gpus:
        if demand.num_infer_gpus is not None:
            raise ConfigError(
                f"deployment.num_infer_gpus is {demand.num_infer_gpus} but no GPU is visible here; leave it out, or"
                f" look at nvidia-smi and {VISIBLE_GPUS}"
            )
        listed, trainer = demand.inference_gpu_ids, demand.trainer_gpu_ids
        return Placement(
            engines=divide(None if listed is None else [str(gpu) for gpu in listed], count),
            trainer=None if trainer is None else tuple(str(gpu) for gpu in trainer),
        )
    engines, trainer = _places(demand, len(gpus))
    return Placement(
        engines=divide([gpus[place] for place in engines], count), trainer=tuple(gpus[place] for place in trainer)
    )


def _places(demand: GpuDemand, num_visible: int) -> tuple[Sequence[int], Sequence[int]]:
    for key in ("inference_gpu_ids", "trainer_gpu_ids"):
        beyond = [gpu for gpu in getattr(demand, key) or () if not 0 <= gpu < num_visible]
        if beyond:
            raise ConfigError(
                f"{key} lists {beyond[0]}, but the GPUs visible here are 0 to {num_visible - 1}; ids count those in"
                f" {VISIBLE_GPUS} where it is set"
            )
    for_engines, for_trainer = demand.for_engines, demand.for_trainer
    engines, trainer = demand.inference_gpu_ids, demand.trainer_gpu_ids
    left = [gpu for gpu in range(num_visible) if gpu not in (*(engines or ()), *(trainer or ()))]
    if num_visible == 1 and for_engines == for_trainer == 1:  # nothing to choose: both work on the one that is there
        return [0] if engines is None else engines, [0] if trainer is None else trainer
    missing = (for_engines if engines is None else 0) + (for_trainer if trainer is None else 0) - len(left)
    if missing > 0:
        raise ConfigError(
            f"inference takes {for_engines} GPU(s) and training {for_trainer}, but {num_visible} are visible here;"
            " lower deployment.num_infer_gpus or deployment.num_train_gpus, or list the same GPU in inference_gpu_ids"
            " and trainer_gpu_ids to share it"
        )
    if engines is None:
        engines, left = left[:for_engines], left[for_engines:]
    return engines, left[:for_trainer] if trainer is None else trainer


def divide(gpus: Sequence[str] | None, count: int) -> tuple[tuple[str, ...] | None, ...]:
    """The GPUs of each of `count` engines, which share them if they are fewer."""
    if gpus is None:
        return (None,) * count
    if len(gpus) < count:
        return tuple((gpus[place % len(gpus)],) if gpus else () for place in range(count))
    return tuple(tuple(gpus[place * len(gpus) // count : (place + 1) * len(gpus) // count]) for place in range(count))
