"""Loads the model and tokenizer that the trainer trains and the embedded engine serves; first thing both do.

A model that will be sharded is made without storage (`empty_model`), sharded, and then filled by `fill_model`, each
rank reading its own shards.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from meshrl.core.config.shared import ModelConfig
from meshrl.core.hub import HUB_ADVICE, NO_ANSWER, give_up_on_silence, told
from meshrl.models.families import attention_implementation, refusal
from meshrl.models.lora import is_adapter
from meshrl.models.sharded import fill_from_whole

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

HUB_NAME = "hub name (no such folder here)"


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
    if device.type == "cuda" and device.index is not None and device.index >= (count := torch.cuda.device_count()):
        raise ModelError(f"model.device is {name!r} but the CUDA devices visible here are 0 to {count - 1}; use 'auto'")
    return device


def resolve_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype a model computes and is published in.

    "auto" is float32 on a CPU, where bfloat16 is slow, and the checkpoint's own dtype elsewhere, but bfloat16 for a
    float32 checkpoint. Trainer and engines go by this one rule, for an engine refuses versions of another dtype.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if resolve_device(config.device).type == "cpu":
        return torch.float32
    dtype = getattr(_model_config(config), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype != torch.float32 else torch.bfloat16


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
        attn_implementation=_runnable(config, model_config),
    )
    return model.to(device).eval()


def empty_model(config: ModelConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model without storage (on the meta device). Raises ModelError."""
    model_config = _model_config(config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_config,
            dtype=dtype,
            attn_implementation=_runnable(config, model_config),
            trust_remote_code=config.trust_remote_code,
        )
    return model


def _runnable(config: ModelConfig, model_config: PreTrainedConfig) -> str | None:
    """The attention to load the model with. Raises ModelError for one that is no causal language model of text."""
    reason = refusal(model_config)
    if reason is not None:
        raise ModelError(
            f"model.name {config.name!r} is of type {model_config.model_type!r}, which is not supported: {reason}; "
            "take a causal language model"
        )
    return attention_implementation(model_config)


@torch.no_grad()
def fill_model(model: PreTrainedModel, config: ModelConfig) -> None:
    """Reads the checkpoint into a model whose parameters have storage, sharded or not; every rank reads its shards.

    A checkpoint whose names are not the model's is loaded whole by transformers, which knows how to convert it, and
    then divided. LoRA adapters are left as they are. Raises ModelError.
    """
    _reset_buffers(model)
    own = {name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
    folder = _weights_folder(config)
    stored: set[str] = set()
    for path in folder.glob("*.safetensors") if folder is not None else ():
        with safe_open(path, framework="pt") as file:
            stored.update(file.keys())
    if folder is not None and own.keys() <= stored:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed.*")
            load(
                {name: parameter.data for name, parameter in own.items()},
                storage_reader=HuggingFaceStorageReader(str(folder)),
            )
        return
    whole = dict(load_model(config.model_copy(update={"device": "cpu"})).named_parameters())
    missing = sorted(own.keys() - whole.keys())
    if missing:
        raise ModelError(f"model.name {config.name!r} has no weights for {missing[:3]} ({len(missing)} in all)")
    for name, parameter in own.items():
        fill_from_whole(parameter, whole[name].detach())


@torch.no_grad()
def fill_at_random(model: PreTrainedModel) -> None:
    """Gives a model with storage the weights of a new one, for benchmarks; every rank calls it."""
    _reset_buffers(model)
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            model._init_weights(module)


def _reset_buffers(model: PreTrainedModel) -> None:
    """Computes the buffers that no checkpoint holds, such as the frequencies of rotary embeddings."""
    for module in model.modules():
        if module._non_persistent_buffers_set:
            model._init_weights(module)


def _weights_folder(config: ModelConfig) -> Path | None:
    """The folder with the checkpoint's safetensors files; None when there are none."""
    folder = Path(config.name)
    if not folder.is_dir():
        give_up_on_silence()
        try:
            folder = Path(snapshot_download(config.name, allow_patterns=["*.safetensors", "*.json"]))
        except (OSError, ValueError, NO_ANSWER) as error:
            raise ModelError(
                f"cannot download the weights of model.name {config.name!r}: {told(error)}; {HUB_ADVICE}"
            ) from error
    return folder if any(folder.glob("*.safetensors")) else None


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


def _model_config(config: ModelConfig) -> PreTrainedConfig:
    loaded: PreTrainedConfig = _from_pretrained(AutoConfig, config)
    return loaded


def _from_pretrained(
    auto_class: type[AutoModelForCausalLM | AutoTokenizer | AutoConfig], source: ModelConfig, /, **kwargs: object
) -> PreTrainedModel | PreTrainedTokenizerBase | PreTrainedConfig:
    is_folder = Path(source.name).is_dir()
    if not is_folder:
        give_up_on_silence()
    try:
        return auto_class.from_pretrained(source.name, trust_remote_code=source.trust_remote_code, **kwargs)
    # A missing, broken or unknown model, one that needs a package, or a hub that does not answer.
    except (OSError, ValueError, ImportError, NO_ANSWER) as error:
        kind, why = ("folder", str(error)) if is_folder else (HUB_NAME, f"{told(error)}; {HUB_ADVICE}")
        raise ModelError(
            f"cannot load {auto_class.__name__} from model.name {source.name!r}, taken as a {kind}: {why}"
        ) from error


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a completion, from the generation config, else the model config."""
    for source in (model.generation_config, model.config.get_text_config()):
        ids: int | list[int] | None = getattr(source, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
