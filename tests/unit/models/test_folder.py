"""What a model's folder may hold: kept, used or refused, before the first step and with the names of files and tensors.

The table is that of docs/models.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import checkpoint_kit as kit
from meshrl.core.config.shared import ModelConfig
from meshrl.models.folder import ModelError
from meshrl.models.load import eos_token_ids, load_model
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from tiny_families import tiny_model

Change = Callable[[Path], None]


def untied(folder: Path) -> Path:
    kit.save_model(folder, tie_word_embeddings=False)
    return folder


def load(folder: Path) -> Any:
    return load_model(ModelConfig(name=str(folder), device="cpu"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def without(*names: str) -> Change:
    return lambda folder: rewrite(
        folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(names)}
    )


def prefixed(folder: Path) -> None:
    rewrite(folder, lambda tensors: {f"policy.{name}": tensor for name, tensor in tensors.items()})


def widened(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(49, 32)})


def in_pieces(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00004.safetensors").unlink(missing_ok=True)


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "other"}')


REFUSED: dict[str, tuple[Change, str]] = {
    "no head": (without("lm_head"), r"has no weights for lm_head\.weight \(1 of 25 tensors of Qwen3ForCausalLM\)$"),
    "no layer": (
        without("model.layers.1."),
        r"has no weights for model\.layers\.1\.input_layernorm\.weight, .*\(11 of",
    ),
    "foreign names": (prefixed, r"no weights for .*\(25 of 25 .*; its files hold policy\.lm_head\.weight, .*not have$"),
    "another shape": (
        widened,
        r"lm_head\.weight is of shape \(49, 32\) in the files and of \(48, 32\) by config\.json",
    ),
    "both of a tie": (
        lambda folder: configure(folder, tie_word_embeddings=True),
        r"config\.json ties lm_head\.weight to model\.embed_tokens\.weight .*set tie_word_embeddings to false",
    ),
    "a file of the index lost": (
        in_pieces,
        r"index\.json lists model-00002-of-0000\d\.safetensors, which is not there",
    ),
    "a torn file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x10" * 100) and None,
        r"model\.safetensors cannot be read",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "weights.gguf") and None,
        r"holds no weights: model\.safetensors or .* is needed, and weights\.gguf is not read",
    ),
    "an adapter": (adapter, r"holds adapter_config\.json, so it is an adapter beside another model; merge the two"),
    "MXFP4": (
        lambda folder: configure(folder, quantization_config={"quant_method": "mxfp4"}),
        r"weights that are quantised \(mxfp4\)",
    ),
    "fp8": (
        lambda folder: configure(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        r"weights that are quantised \(fp8\), .* dequantize=True",
    ),
    "a broken generation config": (
        lambda folder: (folder / "generation_config.json").write_text("{") and None,
        r"generation_config\.json cannot be read",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_refused(case: str, tmp_path: Path) -> None:
    """In the trainers as in the embedded engine."""
    change, message = REFUSED[case]
    change(untied(tmp_path))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)
    with pytest.raises(ModelError, match=message):
        kit.build(str(tmp_path))


def test_a_router_bias_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    tiny_model("glm4_moe", None).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda found: {name: found[name] for name in found if "correction_bias" not in name})
    with pytest.raises(ModelError, match=r"has no weights for model\.layers\.1\.mlp\.gate\.e_score_correction_bias"):
        load(tmp_path)


def torch_files(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def both_alike(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def head_alone(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)
    without("model.embed_tokens.weight")(folder)


def shards(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "consolidated.safetensors").write_bytes(b"of another program")


def without_prefix(folder: Path) -> None:
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})


def with_more(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "visual.patch.weight": torch.zeros(3)})


USED: dict[str, Change] = {
    "pytorch_model.bin": torch_files,
    "a tied head beside its embedding": both_alike,
    "a tied head alone": head_alone,
    "an index, and files beside it": shards,
    "names without the base model's prefix": without_prefix,
    "tensors of another half": with_more,
    "bfloat16": lambda folder: rewrite(folder, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()}),
    "keys that no program knows": lambda folder: configure(folder, made_by="us", rope_note={"a": 1}),
}


@pytest.mark.parametrize("case", USED)
def test_a_folder_is_used_as_transformers_uses_it_and_written_again(case: str, tmp_path: Path) -> None:
    USED[case](untied(tmp_path / "base"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    own, token_ids = load(tmp_path / "base"), torch.arange(20)[None]
    assert torch.equal(own(token_ids).logits, plain(token_ids).logits)
    learner = kit.build(str(tmp_path / "base"))
    written = Checkpointer(learner, tmp_path, tokenizer=None).save(weights_only=True)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(written)(token_ids).logits, plain(token_ids).logits)
    if case.startswith("keys"):
        assert json.loads((written / "config.json").read_text())["made_by"] == "us"


def test_the_text_half_of_an_image_model_is_read_under_its_names(tmp_path: Path) -> None:
    tiny_model("qwen3_5_text", None).save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {
            **{name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()},
            "model.visual.patch_embed.weight": torch.zeros(3),
        },
    )
    plain, token_ids = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), torch.arange(2, 20)[None]
    assert torch.equal(load(tmp_path)(token_ids).logits, plain(token_ids).logits)


# --- the generation config --------------------------------------------------------------------------

ODD = b'{"eos_token_id": [7, 3], "temperature": 0.6,\n "top_p": 0.9, "ours": 1}'  # invalid: nothing samples by it


@pytest.mark.parametrize("stored", [ODD, None])
def test_the_generation_config_is_written_as_it_was_read(stored: bytes | None, tmp_path: Path) -> None:
    name = kit.save_model(tmp_path / "base")
    (tmp_path / "base/generation_config.json").unlink()
    if stored is not None:
        (tmp_path / "base/generation_config.json").write_bytes(stored)
    learner = kit.build(name)
    kit.train(learner, 1)
    base = ModelConfig(name=name, device="cpu")
    written = Checkpointer(learner, tmp_path, tokenizer=None, base=base).save(weights_only=True)
    kept = written / "generation_config.json"
    assert (kept.read_bytes() if kept.is_file() else None) == stored
    assert eos_token_ids(load(written)) == ((7, 3) if stored is not None else ())


def test_what_cannot_be_written_is_known_before_the_first_step(tmp_path: Path) -> None:
    learner = kit.build(kit.save_model(tmp_path / "base"))
    learner.model.config.temperature = 0.6  # which save_pretrained refuses in a model's configuration
    with pytest.raises(CheckpointError, match=r"snapshots of model\.name .* could not be written: .*temperature"):
        Checkpointer(learner, tmp_path, tokenizer=None)
    assert not (tmp_path / "weights").exists()
