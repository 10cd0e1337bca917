"""Loads the tokenizer of a folder without torch, if the folder's files suffice.

AutoTokenizer reads the model's configuration first, which imports torch: three seconds of a core and 500 MiB in every
process that plays. Unknown folders are left to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERIC = "PreTrainedTokenizerFast"
"""Takes everything from tokenizer.json."""
_CLASSES: Mapping[str, Mapping[str, str]] = {
    "llama": {"PreTrainedTokenizerFast": GENERIC, "TokenizersBackend": GENERIC},
    "qwen3": {"PreTrainedTokenizerFast": GENERIC, "TokenizersBackend": GENERIC, "Qwen2Tokenizer": "Qwen2Tokenizer"},
}
"""The class that AutoTokenizer chooses, by model_type of config.json and tokenizer_class of tokenizer_config.json."""
_VISION = ("vision_config", "vision_tower", "image_token_id")
"""Keys of a model that sees images, for which no renderer may be taken on trust."""


def known_class(name: str) -> str | None:
    """None if only AutoTokenizer can choose the class of the folder `name`. A folder with a class is that of a model of
    text alone."""
    folder = Path(name)
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        model = _read(folder / "config.json")
        tokenizer = _read(folder / "tokenizer_config.json")
    except (OSError, ValueError):  # AutoTokenizer says what is wrong with it
        return None
    if "auto_map" in tokenizer or "auto_map" in model or any(model.get(key) is not None for key in _VISION):
        return None
    return _CLASSES.get(str(model.get("model_type")), {}).get(str(tokenizer.get("tokenizer_class")))


def load_known(name: str) -> PreTrainedTokenizerBase | None:
    """None as `known_class`. Raises OSError or ValueError."""
    chosen = known_class(name)
    if chosen is None:
        return None
    import transformers  # takes half a second, and the front of the workers needs no tokenizer

    loaded: PreTrainedTokenizerBase = getattr(transformers, chosen).from_pretrained(name)
    return loaded


def _read(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no JSON object")
    return values
