"""LoRA adapters of a vLLM engine: writes each version as a PEFT folder, which vLLM loads beside the others."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from meshrl.core.orphans import FolderGuardian
from meshrl.core.private_folders import SHM
from meshrl.inference.engine import HostVersion
from meshrl.versions import peft
from meshrl.versions.files import no_room
from meshrl.versions.layout import Layout
from meshrl.wire.errors import MeshError, Reason


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
