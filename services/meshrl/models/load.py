"""Loads the model and tokenizer that the trainer trains and the embedded engine serves.

Between `empty_model` and `fill_model` a trainer adds adapters and shards it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from loguru import logger
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import meta_device_safe_creation_ops

from meshrl.core.config.shared import ModelConfig
from meshrl.core.huggingface import ADVICE, NO_ANSWER, give_up_on_silence, told
from meshrl.models.families import attention_implementation, refusal
from meshrl.models.folder import GENERATION_CONFIG, ModelError, ModelFolder, WeightReader
from meshrl.models.sharded import fill_part, own_part
from meshrl.models.state import keep_float32, stored_tensors
from meshrl.versions import peft

__all__ = ["ModelError"]

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def resolve_device(name: str) -> torch.device:
    """For "auto" cuda if present, else cpu. Raises ModelError for an absent device."""
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
    """The dtype a model computes and is published in; one rule, since an engine refuses versions of another dtype.

    "auto" is float32 on a CPU, where bfloat16 is slow, and elsewhere the checkpoint's, but bfloat16 for float32.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if resolve_device(config.device).type == "cpu":
        return torch.float32
    dtype = getattr(model_shape(config), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype != torch.float32 else torch.bfloat16


def load_model(config: ModelConfig) -> PreTrainedModel:
    """A causal LM on its device, in eval mode. Raises ModelError."""
    device = resolve_device(config.device)
    model = empty_model(config, dtype=resolve_dtype(config))
    model.to_empty(device=device)
    model.tie_weights()  # which to_empty undoes
    fill_model(model, config)
    return model.eval()


def empty_model(config: ModelConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device, with its generation config. Raises ModelError."""
    model_config = model_shape(config)
    if (reason := refusal(model_config)) is not None:
        raise ModelError(
            f"model.name {config.name!r} is of type {model_config.model_type!r}, which is not supported: {reason}; "
            "take a causal language model"
        )
    attention = attention_implementation(model_config)
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
            )
    except (KeyError, TypeError, AttributeError) as error:  # of a value that transformers did not check
        raise ModelError(f"model.name {config.name!r}: its config.json makes no model: {error!r}; mend it") from error
    keep_float32(model)
    try:
        model.generation_config = GenerationConfig.from_pretrained(config.name)
    except OSError as error:  # many models have none: then the model's own configuration has the tokens that end
        if (Path(config.name) / GENERATION_CONFIG).is_file():
            raise ModelError(f"model.name {config.name!r}: {GENERATION_CONFIG} cannot be read: {error}") from error
    return model


@torch.no_grad()
def fill_model(model: PreTrainedModel, config: ModelConfig) -> None:
    """Reads the published weights into a model with storage; each rank its own shards. Adapters stay as they are.

    Raises ModelError.
    """
    reader = WeightReader(ModelFolder.find(config), model)
    for module in model.modules():
        module._is_hf_initialized = not module._non_persistent_buffers_set
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()  # the others: what no file holds, such as the frequencies of rotary embeddings
    own = stored_tensors(model)
    for name, value in reader.read(lambda name: own_part(own[name])):
        fill_part(own[name], value)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises ModelError, also for a folder without: transformers would make up an empty one."""
    folder = Path(config.name)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.name {config.name!r} holds no tokenizer; save one there ({' or '.join(TOKENIZER_FILES)})"
        )
    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, config)
    return tokenizer


def embedding_rows(config: ModelConfig) -> int | None:
    """The number of tokens by a model's configuration. None without one."""
    try:
        rows = getattr(model_shape(config).get_text_config(), "vocab_size", None)
    except ModelError:  # which whatever loads the model raises again
        return None
    return rows if isinstance(rows, int) else None


def model_shape(config: ModelConfig) -> PreTrainedConfig:
    """The configuration of a model. Raises ModelError."""
    if (Path(config.name) / peft.CONFIG_FILE).is_file():
        raise ModelError(
            f"model.name {config.name!r} holds {peft.CONFIG_FILE}, so it is an adapter beside another model; merge the "
            "two (PEFT's merge_and_unload, then save_pretrained) and take that folder"
        )
    loaded: PreTrainedConfig = _from_pretrained(AutoConfig, config)
    return loaded


def _from_pretrained(
    auto_class: type[AutoTokenizer | AutoConfig], source: ModelConfig
) -> PreTrainedTokenizerBase | PreTrainedConfig:
    is_folder = Path(source.name).is_dir()
    if not is_folder:
        give_up_on_silence()
    try:
        return auto_class.from_pretrained(source.name, trust_remote_code=source.trust_remote_code)
    # A missing, broken or unknown model, one that needs a package, or a hub that does not answer.
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, NO_ANSWER) as error:
        kind, why = (
            ("folder", str(error)) if is_folder else ("hub name (no such folder here)", f"{told(error)}; {ADVICE}")
        )
        raise ModelError(
            f"cannot load {auto_class.__name__} from model.name {source.name!r}, taken as a {kind}: {why}"
        ) from error


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a completion, by the generation config, else the model's; without those beyond the
    vocabulary. Raises ModelError for what is no token id."""
    config = model.config.get_text_config()
    for source in (model.generation_config, config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            ids = found if isinstance(found, list | tuple) else [found]
            if not all(isinstance(each, int) for each in ids):
                raise ModelError(f"eos_token_id of {type(source).__name__} must be token ids, got {found!r}; mend it")
            if unknown := [each for each in ids if not 0 <= each < config.vocab_size]:
                logger.warning("eos_token_id {} is left out: the model has {} tokens", unknown, config.vocab_size)
            return tuple(each for each in ids if each not in unknown)
    return ()
