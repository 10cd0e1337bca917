"""LoRA adapters of a vLLM engine: writes each version as a PEFT folder, which vLLM loads over the one before."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from meshrl.core.orphans import FolderGuardian
from meshrl.core.private_folders import SHM
from meshrl.inference.engine import HostVersion
from meshrl.versions import peft
from meshrl.versions.files import no_room
from meshrl.versions.layout import Layout
from meshrl.wire.errors import MeshError, Reason

if TYPE_CHECKING:  # vLLM is an extra, and takes seconds to import
    from vllm.lora.request import LoRARequest

ADAPTER_NAME, ADAPTER_ID = "policy", 1


@dataclass(frozen=True, kw_only=True)
class StagedAdapter:
    """An adapter on disk, not served yet."""

    version: int
    folder: Path

    @property
    def request(self) -> LoRARequest:
        """Loads the folder in place of the adapter that is served."""
        return _request(self.folder, load_inplace=True)


class AdapterStore:
    """The adapter folders of one engine; blocking, so use `write` off the event loop.

    They are gone when the engine ends, also when it is killed.
    """

    def __init__(self, max_rank: int, *, folder: Path = SHM) -> None:
        """`folder`: where to put them; the temporary folder where it is none."""
        self._max_rank = max_rank
        self._root = Path(tempfile.mkdtemp(prefix="meshrl-lora-", dir=folder if folder.is_dir() else None))
        self._guardian = FolderGuardian(self._root)
        self._served: StagedAdapter | None = None

    @property
    def request(self) -> LoRARequest | None:
        """What requests name; None while only the base model is served."""
        if self._served is None:
            return None
        return _request(self._served.folder)

    def write(self, host: HostVersion, layout: Layout) -> StagedAdapter:
        """Writes an adapter.

        Raises MeshError LAYOUT_MISMATCH when it does not fit the base model or vLLM's limit, OVERLOADED when there is
        no room for it.
        """
        assert host.adapter is not None
        if host.adapter.rank > self._max_rank:
            raise MeshError(
                Reason.LAYOUT_MISMATCH,
                f"the adapter has rank {host.adapter.rank}, vLLM was started for at most {self._max_rank};"
                " raise inference.vllm.max_lora_rank",
            )
        adapted = peft.check_fit(host.version, host.adapter, host.tensors, {name: shape for name, _, shape in layout})
        if of_experts := [weight.name for weight in adapted if weight.experts]:
            raise MeshError(
                Reason.NOT_SUPPORTED,
                f"version {host.version} adapts experts ({of_experts[0]}), which vLLM reads in another order for some"
                " models, and then serves other weights; publish merged weights: set"
                " trainer.weight_broadcast.lora_adapter_only to false",
            )
        folder = self._root / f"version_{host.version}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            peft.write_folder(folder, host.tensors, peft.config_table(host.adapter))
        except (OSError, SafetensorError) as error:  # the latter for a full disk as well
            shutil.rmtree(folder, ignore_errors=True)
            raise no_room(host.version, [self._root.parent], error) from error
        return StagedAdapter(version=host.version, folder=folder)

    def serve(self, staged: StagedAdapter) -> None:
        """vLLM has loaded it: the folder of the one before goes."""
        before, self._served = self._served, staged
        if before is not None and before.folder != staged.folder:
            shutil.rmtree(before.folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        self._guardian.close()


def _request(folder: Path, *, load_inplace: bool = False) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=load_inplace)
