"""Is the model there, whole, and with a tokenizer? Looks at files alone, where transformers would look."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshrl.launch.preflight.findings import Finding, Plan, error, note

REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")
_NO_SAFETENSORS = (OSError, ValueError, KeyError, TypeError, IndexError, MemoryError, OverflowError)
"""What reading the header of another file raises."""

ADVICE = "give a folder with a Hugging Face model, or a name on the Hugging Face hub"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    num_params: int
    num_bytes: int


def check_models(plan: Plan) -> Iterator[Finding]:
    """Models and tokenizers of the programs that are started, each name once."""
    models, tokenizers = _named(plan)
    for name, key in models.items():
        folder = local_folder(name)
        if folder is None:
            yield from _absent(key, name)
        else:
            yield from _incomplete(key, name, folder)
    for name, key in tokenizers.items():
        folder = local_folder(name)
        if folder is None:
            if name not in models:
                yield from _absent(key, name)
        elif not any((folder / file).is_file() for file in TOKENIZER_FILES):
            yield error(f"{key} {name!r} holds no tokenizer; save one there ({' or '.join(TOKENIZER_FILES)})")


def local_folder(name: str) -> Path | None:
    """The folder here that a model's name stands for. None when it would have to be fetched."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if REPOSITORY.fullmatch(name) is None:
        return None
    from huggingface_hub import try_to_load_from_cache  # half a second, which a run from a folder need not wait for

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def stored_size(folder: Path) -> ModelSize | None:
    """Parameters and bytes of the safetensors files of a folder. None when there are none that can be read."""
    num_params = num_bytes = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
            num_params += sum(math.prod(tensor["shape"]) for tensor in tensors)
            num_bytes += sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors)
        except _NO_SAFETENSORS:
            return None
    return ModelSize(num_params=num_params, num_bytes=num_bytes) if num_params else None


def is_offline() -> bool:
    words = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(word.strip().upper() in {"1", "ON", "YES", "TRUE"} for word in words)


def _named(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    config = plan.config
    models: dict[str, str] = {}
    if plan.config.starts("trainer"):
        models[config.trainer.model.name] = "trainer.model.name"
    if config.inference is not None:
        models.setdefault(config.inference.model.name, "inference.model.name")
    tokenizers: dict[str, str] = {}
    if plan.config.starts("rollout"):
        own = config.rollout.tokenizer
        tokenizers[own or config.rollout.model.name] = "rollout.model.name" if own is None else "rollout.tokenizer"
    return models, tokenizers


def _absent(key: str, name: str) -> Iterator[Finding]:
    if Path(name).exists():
        yield error(f"{key} {name!r} is a file; {ADVICE}")
    elif REPOSITORY.fullmatch(name) is None:
        yield error(f"{key} {name!r} is no folder; {ADVICE}")
    elif is_offline():
        yield error(
            f"{key} {name!r} is neither a folder nor in the cache of the Hugging Face hub, and HF_HUB_OFFLINE forbids"
            " to fetch it; fetch it where there is a network, or give a folder"
        )
    else:
        yield note(f"{key} {name!r} is not in the cache of the Hugging Face hub: the programs will fetch it")


def _incomplete(key: str, name: str, folder: Path) -> Iterator[Finding]:
    where = f"{key} {name!r}"
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield error(f"{where} has no config.json, so it is no Hugging Face model; {ADVICE}")
        return
    except (OSError, ValueError) as problem:
        yield error(f"{where}: its config.json cannot be read ({problem}); restore it, or give another model")
        return
    if not isinstance(kind, dict) or not (kind.get("model_type") or kind.get("auto_map")):
        yield error(f"{where}: its config.json names no model_type; {ADVICE}")
    missing = _missing_weights(folder)
    if missing and (folder == Path(name) or is_offline()):
        yield error(f"{where} lacks its weights ({missing}); restore them, or give another model")
    elif missing:
        yield note(f"{where} is in the cache without its weights: the programs will fetch them")


def _missing_weights(folder: Path) -> str:
    for index in INDEXES:
        try:
            shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{index} cannot be read"
        return next((shard for shard in sorted(shards) if not (folder / shard).is_file()), "")
    if any((folder / file).is_file() for file in WHOLE) or any(folder.glob("*.safetensors")):
        return ""
    return WHOLE[0]
