"""LoRA adapters of a vLLM engine: each version is written as a PEFT folder, which a worker loads beside the others.

It loads an adapter in parts, between the engine's steps, so that no step waits for all of it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError

from meshrl.core.orphans import FolderGuardian
from meshrl.core.private_folders import SHM
from meshrl.inference.engine import HostVersion
from meshrl.inference.vllm.file_reader import stored_tensors
from meshrl.versions import peft
from meshrl.versions.files import no_room
from meshrl.versions.layout import Layout
from meshrl.wire.errors import MeshError, Reason

Part: TypeAlias = "Sequence[tuple[str, str, Sequence[int], int, int]]"
"""Tensors that are loaded at once: name, torch's dtype, shape, first byte in the file and the byte after its last."""


class AdapterStore:
    """The adapter folders of one engine; blocking, so use `write` off the event loop.

    vLLM may read a folder again while requests name it. All are gone when the engine ends, also when it is killed.
    """

    def __init__(self, max_rank: int, *, folder: Path = SHM) -> None:
        self._max_rank = max_rank
        self._root = Path(tempfile.mkdtemp(prefix="meshrl-lora-", dir=folder if folder.is_dir() else None))
        self._guardian = FolderGuardian(self._root)

    def write(self, host: HostVersion, layout: Layout, number: int) -> Path:
        """Raises MeshError LAYOUT_MISMATCH when it does not fit the base model or vLLM's limit, NOT_SUPPORTED,
        OVERLOADED when there is no room."""
        assert host.adapter is not None
        if host.adapter.rank > self._max_rank:
            raise MeshError(
                Reason.LAYOUT_MISMATCH,
                f"the adapter has rank {host.adapter.rank}, vLLM was started for at most {self._max_rank};"
                " raise inference.lora_rank",
            )
        adapted = peft.check_fit(host.version, host.adapter, host.tensors, {name: shape for name, _, shape in layout})
        if of_experts := [weight.name for weight in adapted if weight.experts]:
            raise MeshError(
                Reason.NOT_SUPPORTED,
                f"version {host.version} adapts experts ({of_experts[0]}), which vLLM reads in another order for some"
                " models, and then serves other weights; publish merged weights: set"
                " trainer.weight_broadcast.lora_adapter_only to false",
            )
        folder = self._root / str(number)
        try:
            peft.write_folder(folder, host.tensors, peft.config_table(host.adapter))
        except (OSError, SafetensorError) as error:  # the latter for a full disk as well
            shutil.rmtree(folder, ignore_errors=True)
            raise no_room(host.version, [self._root.parent], error) from error
        return folder

    def remove(self, number: int) -> None:
        shutil.rmtree(self._root / str(number), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        self._guardian.close()


def parts_of(folder: Path) -> list[Part]:
    """Each has the layers of one block's attention, or of its MLP, whose matrices vLLM packs together."""
    found = defaultdict(list)
    with (folder / peft.WEIGHTS_FILE).open("rb") as file:
        for tensor in stored_tensors(file.fileno(), folder / peft.WEIGHTS_FILE):
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[part_of(tensor.name)].append((tensor.name, dtype, tensor.shape, tensor.start, tensor.end))
    return list(found.values())


class AdapterParts:
    """One adapter on its way into a slot of vLLM's adapter manager, its own from the start; no request names it before
    the last part is in."""

    def __init__(self, worker_manager: Any, number: int, folder: Path, device: torch.device) -> None:
        from vllm.lora.peft_helper import PEFTHelper

        self._of_worker, self._manager = worker_manager, worker_manager._adapter_manager
        self._number, self._device = number, device
        self._file = (folder / peft.WEIGHTS_FILE).open("rb", buffering=0)
        self._modules = defaultdict(list)
        for name in self._manager.modules:
            self._modules[part_of(name)].append(name)
        self._peft = PEFTHelper.from_local_dir(str(folder), worker_manager.max_position_embeddings)
        self._peft.validate_legal(worker_manager.lora_config)
        packed = self._manager.packed_modules_mapping
        ends = {name.rpartition(".")[2] for name in self._manager.modules}
        self._expected = {name for end in ends for name in packed.get(end, [end])}
        self._whole: Any = None  # vLLM's LoRAModel
        self._filled: set[str] = set()
        if len(self._manager._active_adapters) >= self._manager.lora_slots:
            self._manager._active_adapters.remove_oldest()
        self._slot = self._manager.lora_index_to_id.index(None)
        self._manager.lora_index_to_id[self._slot] = number
        self._manager._active_adapters[number] = None

    def load(self, part: Part, *, last: bool) -> None:
        """Raises ValueError for a layer that vLLM does not adapt."""
        of_worker = self._of_worker
        with _on_one_thread(), _unpinned():
            made = of_worker._lora_model_cls.from_lora_tensors(
                self._number,
                {name: self._read(dtype, shape, start, end) for name, dtype, shape, start, end in part},
                self._peft,
                device="cpu",
                dtype=of_worker.lora_config.lora_dtype,
                model_vocab_size=of_worker.vocab_size,
                weights_mapper=renames(getattr(self._manager.model, "hf_to_vllm_mapper", None)),
                skip_prefixes=getattr(self._manager.model, "lora_skip_prefixes", None),
            )
            if strange := [name for name in made.loras if name.rpartition(".")[2] not in self._expected]:
                raise ValueError(
                    f"vLLM takes no adapter for {strange[0]}, only for {', '.join(sorted(self._expected))}"
                )
            manager = self._manager_of(made.loras)
            manager._create_merged_loras_inplace(made)
            for name, module in manager.modules.items():
                weights = manager._get_lora_layer_weights(made, name)
                if weights is None:
                    continue
                self._filled.add(name)
                if manager.lora_index_to_id[self._slot] == self._number:  # else vLLM fills one when a request comes
                    module.set_lora(self._slot, self._pinned(weights.lora_a), self._pinned(weights.lora_b))
        if self._whole is None:
            self._whole = made
        else:
            self._whole.loras.update(made.loras)
        if last:
            self.close()
            self._finish()

    def close(self) -> None:
        self._file.close()

    def _read(self, dtype: str, shape: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Into memory of its own: where all lie in one mapping of the file, a step waits for the whole of it to go."""
        read = torch.empty(end - start, dtype=torch.uint8)
        self._file.seek(start)
        if self._file.readinto(read.numpy().data) != len(read):
            raise OSError(f"{self._file.name} ended before byte {end}")
        return read.view(getattr(torch, dtype)).view(*shape)

    def _manager_of(self, names: Iterable[str]) -> Any:
        """vLLM's manager with the modules of these layers' parts alone: it looks at all that it has, for every part."""
        manager = copy(self._manager)
        own = [name for part in dict.fromkeys(map(part_of, names)) for name in self._modules[part]]
        manager.modules = {name: manager.modules[name] for name in own}
        manager.packed_modules = {name: manager.packed_modules[name] for name in own if name in manager.packed_modules}
        return manager

    def _finish(self) -> None:
        manager = self._manager
        if manager.lora_index_to_id[self._slot] == self._number:
            for name in manager.modules.keys() - self._filled:
                manager.modules[name].reset_lora(self._slot)
        if len(manager) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager._registered_adapters[self._number] = self._whole

    def _pinned(self, matrices: Any) -> Any:
        """Copies from which the device reads while the engine goes on; torch reuses their memory."""
        if isinstance(matrices, list):
            return [self._pinned(each) for each in matrices]
        return matrices if matrices is None or self._device.type == "cpu" else matrices.pin_memory()


def renames(mapper: Any) -> Any:
    """A model's mapper of names without the layers that vLLM's manager packs itself."""
    for method in ("get_rename_mapper", "get_unstacked_mapper"):  # vLLM 0.29 and later, 0.25 to 0.28
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper


class AdapterRest:
    """Freed some layers at a time: no step waits for all of them."""

    LAYERS = 24

    def __init__(self, worker_manager: Any, number: int) -> None:
        adapter = worker_manager._adapter_manager._registered_adapters.get(number)
        self._layers = [] if adapter is None else list(adapter.loras.values())
        worker_manager.remove_adapter(number)

    def free(self) -> int:
        """Frees LAYERS at most; returns how many are left."""
        del self._layers[-self.LAYERS :]
        return len(self._layers)


@lru_cache(1 << 16)
def part_of(name: str) -> str:
    """The block of a tensor: model.layers.3.self_attn of model.layers.3.self_attn.q_proj.lora_A.weight; "" without
    one."""
    names = name.split(".")
    number = next((place for place, each in enumerate(names) if each.isdigit()), None)
    return "" if number is None else ".".join(names[: number + 2])


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Torch's threads wait for each other after every small matrix: of the parts of a 4B model one in a hundred took 57
    ms or more on the 16 cores of an H100's host, on one thread 2.6."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _unpinned() -> Iterator[None]:
    """Keeps vLLM from pinning each matrix for the adapter's life: a call to the driver each, for which the GPU
    waits."""
    from vllm.lora import lora_model, model_manager

    pinning = {"PIN_MEMORY": False, "is_pin_memory_available": lambda: False}  # by release
    before = [(m, name, getattr(m, name)) for m in (lora_model, model_manager) for name in pinning if hasattr(m, name)]
    for module, name, _ in before:
        setattr(module, name, pinning[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
