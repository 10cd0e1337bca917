"""Loads weights from a folder into the running engine by hand: /update_weights, /reload_weights, /load_lora_adapter.

Only for engines that follow no hub: an agent restores the hub's version as soon as it notices.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from meshrl.inference.engine import Engine, HostVersion
from meshrl.models.folder import ModelError, ModelFolder, WeightReader
from meshrl.versions import peft
from meshrl.versions.layout import TORCH_DTYPES
from meshrl.wire.errors import MeshError, Reason

_BEYOND_PLAIN_LORA = (
    "use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
    "alora_invocation_tokens",
)  # fmt: skip
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of PEFT's init_lora_weights that change the base weights, when an adapter is made and when it is loaded."""


class WeightLoader:
    def __init__(self, engine: Engine, base_model: str) -> None:
        self._engine = engine
        self._base_model = base_model
        self._lock = asyncio.Lock()

    async def load(self, folder: Path | None, version: int) -> float:
        """Serves the weights in `folder` (None: the base model's) as `version`; returns the pause in seconds. Raises
        MeshError INVALID_REQUEST, LAYOUT_MISMATCH."""
        async with self._lock:
            source = self._folder(folder)
            tensors = await asyncio.to_thread(read_checkpoint, source, self._engine)
            files = tuple(sorted(source.glob("*.safetensors")))
            return await self._serve(HostVersion(version=version, tensors=tensors, files=files))

    async def load_adapter(self, folder: Path, name: str, version: int | None) -> int:
        """Serves the LoRA adapter in `folder`, in PEFT's format, to requests for the model `name`; returns its version.
        Raises MeshError INVALID_REQUEST, NOT_SUPPORTED for other LoRA than base + lora_alpha / r * B A,
        LAYOUT_MISMATCH."""
        adapters = self._engine.adapters
        if adapters is None:
            raise MeshError(Reason.NOT_SUPPORTED, "this engine takes no adapters; set inference.enable_lora")
        async with self._lock:
            if version is None:
                before = adapters.newest.get(name)
                last = self._engine.version if before is None else before.version
                version = 0 if last is None else last + 1
            host = await asyncio.to_thread(read_adapter, folder, version)
            await self._engine.stage(replace(host, run_id=name))
            adapters.serve(name, version)
            return version

    async def _serve(self, host: HostVersion) -> float:
        engine = self._engine
        await engine.stage(host)
        was_paused = engine.paused
        await engine.pause()
        started = time.perf_counter()
        try:
            await engine.apply(host.version, b"")
        finally:
            if not was_paused and engine.unfit is None:
                await engine.resume()
        pause_s = time.perf_counter() - started
        await engine.adopt(host.version, await engine.weights_root())
        return pause_s

    def _folder(self, folder: Path | None) -> Path:
        if folder is not None:
            return folder
        base = Path(self._base_model)
        if base.is_dir():
            return base
        try:  # a hub model: its files are in the local cache, as it was loaded once
            return Path(snapshot_download(self._base_model, local_files_only=True))
        except (OSError, ValueError) as error:  # the latter for a folder that is gone, which is no name on the hub
            text = f"the files of base model {self._base_model!r} are not on this host"
            raise MeshError(Reason.INVALID_REQUEST, text) from error


def read_checkpoint(folder: Path, engine: Engine) -> dict[str, torch.Tensor]:
    """Without tied duplicates, in the layout's dtypes; `stage` names missing ones. Raises MeshError INVALID_REQUEST,
    LAYOUT_MISMATCH."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except (OSError, ValueError) as error:  # it is not there, or has characters that no path has
        why = getattr(error, "strerror", None) or error
        raise MeshError(Reason.INVALID_REQUEST, f"{str(folder)[:200]!r} is no folder of a checkpoint: {why}") from error
    if not files:
        raise MeshError(Reason.INVALID_REQUEST, f"no *.safetensors in {folder}; pass the folder of a checkpoint")
    dtypes = {name: TORCH_DTYPES.get(dtype) or getattr(torch, dtype) for name, dtype, _ in engine.layout()}
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - not a mapping, it has only keys()
                    if name in dtypes:
                        tensors[name] = stored.get_tensor(name).to(dtypes[name])
        except (OSError, SafetensorError) as error:
            raise MeshError(Reason.INVALID_REQUEST, f"{file} is not a readable safetensors file: {error}") from error
    if dtypes.keys() - tensors.keys() and engine.outline is not None:  # such as experts, one by one in files
        try:
            reader = WeightReader(ModelFolder(str(folder), folder), engine.outline)
            tensors = {name: tensor.to(dtypes[name]) for name, tensor in reader.read()}
        except ModelError as error:
            raise MeshError(Reason.LAYOUT_MISMATCH, str(error)) from error
    return tensors


def read_adapter(folder: Path, version: int) -> HostVersion:
    """Raises MeshError INVALID_REQUEST, NOT_SUPPORTED."""
    try:
        table, tensors = peft.read_folder(folder)
        adapter = peft.config_of(table)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        named = f"{peft.CONFIG_FILE}, {peft.WEIGHTS_FILE}"
        why = getattr(error, "strerror", None) or repr(error)
        text = f"{str(folder)[:200]!r} is no folder of an adapter in PEFT's format ({named}): {why}"
        raise MeshError(Reason.INVALID_REQUEST, text) from error
    beyond = [key for key in _BEYOND_PLAIN_LORA if table.get(key)]
    if beyond:
        raise MeshError(Reason.NOT_SUPPORTED, f"{folder} has {', '.join(beyond)}; this engine takes plain LoRA")
    made_by = str(table.get("init_lora_weights"))
    if made_by.startswith(_OTHER_BASE):
        text = (
            f"{folder} has init_lora_weights {made_by!r}: it belongs to changed base weights; save it as plain LoRA"
            " (save_pretrained with path_initial_model_for_weight_conversion)"
        )
        raise MeshError(Reason.NOT_SUPPORTED, text)
    return HostVersion(version=version, tensors=tensors, adapter=adapter, files=(folder / peft.WEIGHTS_FILE,))
