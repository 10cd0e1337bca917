"""Loads weights from a checkpoint folder into the running engine: /update_weights and /reload_weights."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from meshrl.inference.engine import Engine, HostVersion
from meshrl.inference.live_weights import Layout
from meshrl.wire.errors import MeshError, Reason

_ONE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


class WeightLoader:
    """Reads safetensors, casts them to the engine's dtypes, stages and applies them as a version. One at a time."""

    def __init__(self, engine: Engine, base_model: str) -> None:
        self._engine = engine
        self._base_model = base_model
        self._lock = asyncio.Lock()

    async def load(self, folder: Path | None, version: int) -> float:
        """Serves the weights in `folder` (None: the base model's) as `version`; returns the pause in seconds.

        Raises: MeshError INVALID_REQUEST when there is no readable checkpoint, LAYOUT_MISMATCH when it does not fit.
        """
        async with self._lock:
            tensors = await asyncio.to_thread(read_checkpoint, self._folder(folder), self._engine.layout())
            await self._engine.stage(HostVersion(version=version, tensors=tensors))
            was_paused = self._engine.paused
            await self._engine.pause()
            started = time.perf_counter()
            try:
                await self._engine.apply(version, b"")
            finally:
                if not was_paused and self._engine.unfit is None:
                    await self._engine.resume()
            pause_s = time.perf_counter() - started
            await self._engine.adopt(version, await self._engine.weights_root())
            return pause_s

    def _folder(self, folder: Path | None) -> Path:
        if folder is not None:
            return folder
        base = Path(self._base_model)
        if base.is_dir():
            return base
        for name in (_ONE_FILE, _INDEX_FILE):  # a hub model: its files are in the local cache, as it was loaded once
            found = cached_file(
                self._base_model, name, local_files_only=True, _raise_exceptions_for_missing_entries=False
            )
            if found:
                return Path(found).parent
        raise MeshError(Reason.INVALID_REQUEST, f"the files of base model {self._base_model!r} are not on this host")


def read_checkpoint(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face checkpoint that the layout names, in the layout's dtypes.

    Tied duplicates and other tensors that the model does not own are left out; `stage` names what is missing.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MeshError(Reason.INVALID_REQUEST, f"no *.safetensors in {folder}; pass the folder of a checkpoint")
    dtypes = {name: getattr(torch, dtype) for name, dtype, _ in layout}
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - not a mapping, it has only keys()
                    if name in dtypes:
                        tensors[name] = stored.get_tensor(name).to(dtypes[name])
        except SafetensorError as error:
            raise MeshError(Reason.INVALID_REQUEST, f"{file} is not a readable safetensors file: {error}") from error
    return tensors
