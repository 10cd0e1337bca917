"""Writes a gathered state as a Hugging Face folder.

The rest comes from an outline, the model without storage, so that writing never touches the one that trains.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from meshrl.core.config.shared import ModelConfig
from meshrl.models.folder import GENERATION_CONFIG, ModelFolder
from meshrl.models.lora import adapter_config, save_adapter
from meshrl.models.state import keep_float32, stored_tensors
from meshrl.training.checkpoints.files import CheckpointError

MAX_FILE_SIZE = "5GB"
ADAPTERS = "lora_adapters"


class WeightsWriter:
    """Writes snapshots of one model, in `dtype`; `write` may run on another thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        tokenizer: PreTrainedTokenizerBase | None,
        base: ModelConfig | None = None,
        base_name: str | None = None,
    ) -> None:
        """Snapshots keep the generation_config.json of `base`. `base_name` is the model under adapters that are written
        on their own as well.

        Writes a snapshot without weights to try it. Raises CheckpointError for a model that cannot be written.
        """
        self._tokenizer = tokenizer
        self._adapter_config = None if base_name is None else adapter_config(model, base_name)
        try:
            self._generation_config = None if base is None else ModelFolder.find(base).read_bytes(GENERATION_CONFIG)
            with torch.device("meta"):
                self._outline: PreTrainedModel = type(model)._from_config(
                    copy.deepcopy(model.config),
                    dtype=dtype,
                    attn_implementation="eager",  # which every model has
                )
            keep_float32(self._outline)
            self._outline._weight_conversions = getattr(model, "_weight_conversions", None)
            self._outline.generation_config = GenerationConfig()  # which can be written; the base's takes its place
            with tempfile.TemporaryDirectory() as folder:
                revert_weight_conversion(self._outline, stored_tensors(self._outline))
                self.write(Path(folder), {}, {})
        except Exception as error:  # whatever the libraries raise, it would end the run at the first save
            why = " ".join(str(error).split())
            raise CheckpointError(
                f"snapshots of model.name {model.config.name_or_path!r} could not be written: {why}; "
                "change its configuration or tokenizer so that save_pretrained of transformers accepts it"
            ) from error

    def write(self, folder: Path, state: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]) -> None:
        """A SnapshotWriter; adds configurations and the tokenizer."""
        self._outline.save_pretrained(folder, state_dict=dict(state), max_shard_size=MAX_FILE_SIZE)
        (folder / GENERATION_CONFIG).unlink(missing_ok=True)
        if self._generation_config is not None:
            (folder / GENERATION_CONFIG).write_bytes(self._generation_config)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
        if self._adapter_config is not None:
            save_adapter(folder / ADAPTERS, adapters, self._adapter_config)
