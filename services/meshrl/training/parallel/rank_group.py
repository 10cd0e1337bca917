"""RankGroup: the process groups of a ParallelPlan, this rank's device, and the collectives of plain data.

Model data moves over the device's backend (NCCL or gloo); everything else over a gloo group on the CPU, so that it
never waits behind a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshrl.models.shares import ContextShare
from meshrl.training.parallel.plan import TENSOR, ParallelPlan

COLLECTIVE_TIMEOUT_S = 600.0

Scalar = TypeVar("Scalar", bound=np.generic)


class RankGroup:
    """One rank in its group; without arguments, a process on its own.

    mesh: what FSDP shards over, the dimensions of `plan.mesh_shape` but for tp; None without sharding (one process on a
    CPU). tensor: that of tp, if any. experts: those of `plan.experts_shape`; None if experts are sharded as all else.
    context: the ranks that share this rank's rows, if any. control: gloo group for plain data; None in a group of one.
    """

    def __init__(
        self,
        plan: ParallelPlan | None = None,
        *,
        device: torch.device | None = None,
        mesh: DeviceMesh | None = None,
        tensor: DeviceMesh | None = None,
        experts: DeviceMesh | None = None,
        context: ContextShare | None = None,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self.plan = plan or ParallelPlan()
        self.device = device or torch.device("cpu")
        self.mesh = mesh
        self.tensor = tensor
        self.experts = experts
        self.context = context
        self.control = control

    @property
    def rank(self) -> int:
        """The plan's, for users of the collectives alone."""
        return self.plan.rank

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @classmethod
    def start(
        cls,
        environment: Mapping[str, str],
        *,
        device: torch.device,
        dp_replicate: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> RankGroup:
        """Joins the group that torchrun's variables describe; before any other collective.

        A GPU without torchrun becomes a group of one, since sharding also mixes precisions; a CPU without torchrun
        needs none. Raises ValueError when dp_replicate, cp, tp and ep do not divide the group.
        """
        plan = ParallelPlan.from_environment(environment, dp_replicate=dp_replicate, cp=cp, tp=tp, ep=ep)
        on_gpu = device.type == "cuda"
        if plan.is_alone and not on_gpu:
            return cls(plan, device=device)
        if on_gpu:
            device = torch.device("cuda", plan.local_rank if device.index is None else device.index)
            torch.cuda.set_device(device)
        if not dist.is_initialized():  # one group a process, whatever meshes are laid over it
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                timeout=timedelta(seconds=timeout_s),
                store=dist.HashStore() if plan.is_alone else None,  # type: ignore[attr-defined]  # not in torch's __all__
                rank=0 if plan.is_alone else -1,  # -1: the environment says it
                world_size=1 if plan.is_alone else -1,
                device_id=device if on_gpu else None,
            )

        def lay(shape: Mapping[str, int]) -> DeviceMesh:
            return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))

        control = None if plan.is_alone else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        rows = lay({"dp": plan.dp_size, "cp": plan.cp, "tp": plan.tp}) if plan.cp > 1 else None
        world = lay(plan.mesh_shape)
        *sharded, last = plan.mesh_shape
        return cls(
            plan,
            device=device,
            mesh=world[tuple(sharded)] if last == TENSOR else world,
            tensor=world[TENSOR] if last == TENSOR else None,
            experts=lay(plan.experts_shape) if plan.ep > 1 else None,
            context=None if rows is None else ContextShare.of(rows.get_group("cp")),
            control=control,
        )

    # --- collectives over the control group; every rank calls them in the same order ----------------

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others pass None."""
        if self.control is None:
            assert data is not None, "a process on its own broadcasts to itself"
            return data
        size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
        dist.broadcast(size, group_src=0, group=self.control)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if buffer.numel():
            dist.broadcast(buffer, group_src=0, group=self.control)
        return buffer.numpy().tobytes()

    def gather(self, array: NDArray[Scalar]) -> list[NDArray[Scalar]] | None:
        """Every rank's array, of one dtype and shape but for the first axis, on rank 0; None elsewhere."""
        if self.control is None:
            return [array]
        lengths = self.sum(np.eye(self.world_size, dtype=np.int64)[self.rank] * len(array)).tolist()
        padded = np.zeros((max(lengths), *array.shape[1:]), dtype=array.dtype)
        padded[: len(array)] = array
        own = torch.from_numpy(padded.reshape(-1).view(np.uint8).copy())
        parts = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else None
        dist.gather(own, parts, group_dst=0, group=self.control)
        if parts is None:
            return None
        return [
            part.numpy().view(array.dtype).reshape(padded.shape)[:length]
            for part, length in zip(parts, lengths, strict=True)
        ]

    def sum(self, array: NDArray[Scalar]) -> NDArray[Scalar]:
        """The elementwise sum over ranks, on every rank."""
        if self.control is None:
            return array
        total = torch.from_numpy(np.ascontiguousarray(array).copy())
        dist.all_reduce(total, group=self.control)
        summed: NDArray[Scalar] = total.numpy()
        return summed

    def sum_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums over ranks by name, on every rank; ranks may have different names."""
        if self.control is None:
            return dict(values)
        own = "\n".join(sorted(values)).encode()
        parts = self.gather(np.frombuffer(own, dtype=np.uint8))
        names: set[str] = set()
        for part in parts or ():
            names.update(part.tobytes().decode().split("\n"))
        everybody = self.broadcast("\n".join(sorted(names)).encode() if self.rank == 0 else None).decode().split("\n")
        total = self.sum(np.array([values.get(name, 0.0) for name in everybody], dtype=np.float64))
        return {name: float(value) for name, value in zip(everybody, total, strict=True) if name}

    def any(self, flag: bool) -> bool:
        return bool(self.sum(np.array([int(flag)], dtype=np.int64))[0])

    def barrier(self) -> None:
        if self.control is not None:
            dist.barrier(group=self.control)

    def close(self) -> None:
        if dist.is_initialized() and (self.mesh is not None or self.control is not None):
            dist.destroy_process_group()
