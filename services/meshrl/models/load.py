"""Loads the model and tokenizer that the trainer trains and the embedded engine serves; first thing both do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from meshrl.core.config.shared import ModelConfig

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class ModelError(Exception):
    """A model could not be loaded; the message says what to change."""


def resolve_device(name: str) -> torch.device:
    """Turns "auto" into cuda where there is one, else cpu. Raises ModelError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:  # torch's own message lists every backend it was ever built for
        raise ModelError(f"model.device {name!r} is no torch device; use 'auto', 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device is {name!r} but this machine has no usable CUDA device; use 'auto' or 'cpu'")
    return device


def resolve_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype a model computes and is published in.

    "auto" is float32 on a CPU, where bfloat16 is slow, and the checkpoint's own dtype elsewhere.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if resolve_device(config.device).type == "cpu":
        return torch.float32
    dtype = getattr(_model_config(config), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def load_model(config: ModelConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Loads a causal LM from a folder or the Hugging Face hub onto its device, in eval mode.

    `dtype` overrides the configured one (the trainer keeps float32 master weights). Raises ModelError.
    """
    device = resolve_device(config.device)
    model_config = _model_config(config)
    model: PreTrainedModel = _from_pretrained(
        AutoModelForCausalLM,
        config,
        config=model_config,
        dtype=resolve_dtype(config) if dtype is None else dtype,
        attn_implementation="sdpa",
    )
    return model.to(device).eval()


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to the model. Raises ModelError.

    A folder must hold one: transformers would make up an empty tokenizer from the model's kind alone.
    """
    folder = Path(config.name)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.name {config.name!r} holds no tokenizer; save one there ({' or '.join(TOKENIZER_FILES)})"
        )
    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, config)
    return tokenizer


def _model_config(config: ModelConfig) -> Any:
    return _from_pretrained(AutoConfig, config)


def _from_pretrained(auto_class: Any, source: ModelConfig, /, **kwargs: Any) -> Any:
    try:
        return auto_class.from_pretrained(source.name, trust_remote_code=source.trust_remote_code, **kwargs)
    except (OSError, ValueError) as error:  # what transformers raises for a missing, broken or unknown model
        kind = "folder" if Path(source.name).is_dir() else "hub name (no such folder here)"
        raise ModelError(
            f"cannot load {auto_class.__name__} from model.name {source.name!r}, taken as a {kind}: {error}"
        ) from error
