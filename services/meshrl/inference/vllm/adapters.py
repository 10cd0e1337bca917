"""LoRA adapters of a vLLM engine: writes each version as a PEFT folder, which vLLM loads over the one before."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

from meshrl.core.guardian import FolderGuardian
from meshrl.inference.embedded.live_weights import Layout
from meshrl.inference.engine import HostVersion
from meshrl.versions.files import SHARED_MEMORY, no_room
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterConfig

if TYPE_CHECKING:  # vLLM is an extra, and takes seconds to import
    from vllm.lora.request import LoRARequest

ADAPTER_NAME, ADAPTER_ID = "policy", 1
PREFIX = "base_model.model."


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

    def __init__(self, max_rank: int, *, folder: Path = SHARED_MEMORY) -> None:
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
        self._check(host, host.adapter, layout)
        folder = self._root / f"version_{host.version}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            self._write(folder, host, host.adapter)
        except (OSError, SafetensorError) as error:  # the latter for a full disk as well
            shutil.rmtree(folder, ignore_errors=True)
            raise no_room(host.version, [self._root.parent], error) from error
        return StagedAdapter(version=host.version, folder=folder)

    def _write(self, folder: Path, host: HostVersion, adapter: AdapterConfig) -> None:
        folder.mkdir(parents=True)
        save_file(
            {name: tensor.contiguous() for name, tensor in host.tensors.items()}, folder / "adapter_model.safetensors"
        )
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": adapter.rank,
            "lora_alpha": adapter.lora_alpha,
            "target_modules": list(adapter.target_modules),
            "base_model_name_or_path": adapter.base_model,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
        }
        (folder / "adapter_config.json").write_text(json.dumps(described))

    def serve(self, staged: StagedAdapter) -> None:
        """vLLM has loaded it: the folder of the one before goes."""
        before, self._served = self._served, staged
        if before is not None and before.folder != staged.folder:
            shutil.rmtree(before.folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        self._guardian.close()

    def _check(self, host: HostVersion, adapter: AdapterConfig, layout: Layout) -> None:
        if adapter.rank > self._max_rank:
            raise MeshError(
                Reason.LAYOUT_MISMATCH,
                f"the adapter has rank {adapter.rank}, vLLM was started for at most {self._max_rank};"
                " raise inference.vllm.max_lora_rank",
            )
        shapes = {name: shape for name, _, shape in layout}
        for name, tensor in host.tensors.items():
            layer, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
            weight = shapes.get(f"{layer}.weight")
            expected = weight and ((adapter.rank, weight[1]) if part.startswith("A") else (weight[0], adapter.rank))
            if tuple(tensor.shape) != expected:
                raise MeshError(
                    Reason.LAYOUT_MISMATCH,
                    f"version {host.version} does not fit the served model: {name} is {tuple(tensor.shape)}, expected "
                    f"{expected or 'no such layer'}",
                )


def _request(folder: Path, *, load_inplace: bool = False) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=load_inplace)
