"""Writes a policy as a Hugging Face folder, which any reader of such folders loads; used by the checkpointer.

The state comes gathered and in Hugging Face names. How its model is configured, tied and split into files comes from
an outline, the model without storage, so that writing never touches the model that trains.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshrl.models.lora import adapter_config, save_adapter
from meshrl.training.config import CheckpointConfig
from meshrl.training.model_config import TrainerModelConfig

MAX_FILE_SIZE = "5GB"
ADAPTERS = "lora_adapters"


def separate_adapters(ckpt: CheckpointConfig | None, model: TrainerModelConfig) -> str | None:
    """The name to give a checkpointer as `adapters_of`; None when adapters are not written on their own."""
    return model.name if ckpt is not None and ckpt.weights.save_adapter_separately and model.lora is not None else None


class WeightsWriter:
    """Writes snapshots of one model, in `dtype`. Made where the model trains; `write` may run on another thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        tokenizer: PreTrainedTokenizerBase | None,
        base_name: str | None = None,
    ) -> None:
        """`base_name` is the model under the adapters, when those are written on their own as well."""
        with torch.device("meta"):
            self._outline: PreTrainedModel = type(model)._from_config(
                copy.deepcopy(model.config),
                dtype=dtype,
                attn_implementation="eager",  # which every model has
            )
        self._outline.generation_config = copy.deepcopy(model.generation_config)
        self._tokenizer = tokenizer
        self._adapter_config = None if base_name is None else adapter_config(model, base_name)

    def write(self, folder: Path, state: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]) -> None:
        """Fills an empty folder with weights, configurations, the tokenizer and the adapters. Raises OSError."""
        self._outline.save_pretrained(folder, state_dict=dict(state), max_shard_size=MAX_FILE_SIZE)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
        if self._adapter_config is not None:
            save_adapter(folder / ADAPTERS, adapters, self._adapter_config)
