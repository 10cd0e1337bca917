"""Tokenizers of folders that say enough are loaded as AutoTokenizer would, without asking it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from renderers.base import create_renderer
from transformers import AutoTokenizer

from chatml_tokenizer import chatml_tokenizer
from meshrl.rollout.rendering.renderer import load_renderer
from meshrl.rollout.rendering.tokenizer_folders import known_class, load_known

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
TEXT = "<|im_start|>user\nWhat is 12 x 12?  <think>hm</think> naïve ✓<|im_end|>\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chatml_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    write(tmp_path, "config.json", model_type="qwen3")
    return tmp_path


def write(folder: Path, file: str, **values: object) -> None:
    """Sets keys of one of the folder's JSON files."""
    path = folder / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **values}))


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "chosen"),
    [
        ("llama", "PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("llama", "TokenizersBackend", "PreTrainedTokenizerFast"),
        ("qwen3", "PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("qwen3", "TokenizersBackend", "PreTrainedTokenizerFast"),
        ("qwen3", "Qwen2Tokenizer", "Qwen2Tokenizer"),
    ],
)
def test_a_known_folder_has_the_tokenizer_and_the_renderer_that_would_be_searched_for(
    folder: Path, model_type: str, tokenizer_class: str, chosen: str
) -> None:
    write(folder, "config.json", model_type=model_type)
    write(folder, "tokenizer_config.json", tokenizer_class=tokenizer_class)
    assert known_class(str(folder)) == chosen
    ours, theirs = load_known(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    assert ours is not None
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.decode(ours(TEXT)["input_ids"]) == theirs.decode(theirs(TEXT)["input_ids"])
    for name in ("special_tokens_map", "chat_template", "name_or_path", "model_max_length", "padding_side"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert type(load_renderer(str(folder), {})) is type(create_renderer(theirs))


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"model_type": "qwen2"}),  # of which AutoTokenizer mistrusts the tokenizer's class
        ("config.json", {"model_type": None}),
        ("config.json", {"vision_config": {"depth": 2}}),
        ("config.json", {"image_token_id": 7}),
        ("config.json", {"auto_map": {"AutoTokenizer": "own.py"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.py", None]}}),
        ("tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": None}),
    ],
)
def test_what_the_files_leave_open_is_left_to_auto_tokenizer(
    folder: Path, file: str, values: dict[str, object]
) -> None:
    assert known_class(str(folder)) == "PreTrainedTokenizerFast"
    write(folder, file, **values)
    assert known_class(str(folder)) is None
    assert load_known(str(folder)) is None


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_folder_without_one_of_the_files_is_left_to_auto_tokenizer(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert known_class(str(folder)) is None


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_left_to_auto_tokenizer(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert known_class(str(folder)) is None


def test_a_name_of_the_hub_is_left_to_auto_tokenizer() -> None:
    assert known_class("Qwen/Qwen3-0.6B") is None
