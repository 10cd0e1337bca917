"""The whole of `sft` over folders that people bring: used as they are, or refused before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint_kit as kit
from chatml_tokenizer import chatml_tokenizer
from meshrl.models.load import ModelError
from meshrl.sft.config import DataConfig, SFTConfig
from meshrl.sft.data.check import check_data
from meshrl.sft.data.conversations import DataError
from meshrl.sft.program import train
from meshrl.training.model_config import LoraConfig, TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from tiny_families import tiny_model

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of untied Qwen3's shape, its tokenizer and a row of data."""
    tokenizer = chatml_tokenizer(TEMPLATE)
    kit.save_model(tmp_path / "model", vocab_size=len(tokenizer), tie_word_embeddings=False)
    tokenizer.save_pretrained(tmp_path / "model")
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def config(folder: Path, *, seq_len: int = 64, **model: Any) -> SFTConfig:
    return SFTConfig(
        model=TrainerModelConfig(name=str(folder / "model"), device="cpu", **model),
        data=DataConfig(name=str(folder / "chat.jsonl"), batch_size=1, seq_len=seq_len),
        max_steps=2,
        torch_threads=1,
        output_dir=folder / "out",
    )


def test_a_generation_config_that_transformers_would_refuse_ends_no_training(folder: Path) -> None:
    stored = b'{"eos_token_id": 258, "temperature": 0.6, "top_p": 0.9}'
    (folder / "model/generation_config.json").write_bytes(stored)
    train(config(folder), (), RankGroup())
    assert (folder / "out/weights/final/generation_config.json").read_bytes() == stored


def test_missing_weights_are_refused_with_their_names(folder: Path) -> None:
    path = folder / "model/model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights for lm_head\.weight"):
        train(config(folder), (), RankGroup())
    assert not (folder / "out/weights").exists()


def test_a_token_beyond_the_embedding_is_named_with_its_row(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder / "model")
    given = config(folder)
    check_data(given.text, given.data)  # a token that no row has does no harm
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<more>"}]}
    with (folder / "chat.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    rows = len(tokenizer) - 1
    message = rf"line 2: token {rows} \('<more>'\) is beyond the {rows} rows of the embedding of model\.name"
    with pytest.raises(DataError, match=message):
        train(config(folder), (), RankGroup())
    assert not (folder / "out/weights").exists()


def test_rows_beyond_learned_positions_are_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tiny_model("gpt2", None, vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    with pytest.raises(
        ModelError, match=r"seq_len 129 is beyond the 128 positions that model\.name .* learned; set it"
    ):
        train(config(folder, seq_len=129), (), RankGroup())
    train(config(folder, seq_len=128), (), RankGroup())


def test_a_sample_beyond_rotary_positions_is_named_once_and_a_row_of_short_ones_is_not(
    folder: Path, warned: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tiny_model("llama", None, vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    train(config(folder, seq_len=1536), (), RankGroup())
    assert not [line for line in warned if "positions" in line]
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo" * 200}]}
    (folder / "chat.jsonl").write_text(json.dumps(row) + "\n")
    train(config(folder, seq_len=129), (), RankGroup())
    (line,) = [line for line in warned if "positions" in line]
    assert "a sample of 129 tokens is beyond the 128 positions (max_position_embeddings)" in line


def test_adapters_on_a_hybrid_reach_its_linear_attention(folder: Path, said: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tiny_model("qwen3_5_text", None, vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    train(config(folder, lora=LoraConfig(rank=2)), (), RankGroup())
    (line,) = [line for line in said if "adapters on" in line]
    assert "linear layers; without: " in line
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder / "model", folder / "out/weights/final")
    )
    changed = {
        name.rpartition(".")[0].rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])
    }
    assert {"in_proj_qkv", "out_proj", "q_proj", "down_proj"} <= changed
