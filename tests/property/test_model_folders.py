"""Any folder that transformers writes of a small model is read, trained for no step and written to the same bits."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import checkpoint_kit as kit
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.model_config import TrainerModelConfig
from tiny_families import tiny_model

FAMILIES = ("llama", "qwen3", "gpt2", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "lfm2_moe", "qwen3_5_text")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cache
def made(family: str, tied: bool) -> PreTrainedModel:
    return tiny_model(family, None, tie_word_embeddings=tied)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    tied=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
    file_size=st.sampled_from(["5GB", "10KB"]),
    bare=st.booleans(),
    generation=st.none()
    | st.binary(min_size=2, max_size=30).map(lambda noise: b'{"eos_token_id": 5, "x": "%s"}' % noise.hex().encode()),
)
def test_no_step_changes_nothing(
    family: str, tied: bool, dtype: str, file_size: str, bare: bool, generation: bytes | None
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        model = made(family, tied)
        copy.deepcopy(model).to(DTYPES[dtype]).save_pretrained(base, max_shard_size=file_size)
        if bare and (base / "model.safetensors").is_file():  # names as of the base model alone
            prefix = f"{model.base_model_prefix}."
            tensors = {name.removeprefix(prefix): tensor for name, tensor in stored(base).items()}
            save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        (base / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (base / "generation_config.json").write_bytes(generation)
        config = TrainerModelConfig(name=str(base), device="cpu")
        checkpointer = Checkpointer(
            *kit.build(str(base)), Path(scratch), tokenizer=None, base=config, snapshot_dtype=DTYPES[dtype]
        )
        written = checkpointer.save(weights_only=True)
        before, after = stored(base), stored(written)
        if not bare:
            assert before.keys() == after.keys()
            assert all(torch.equal(tensor.float(), after[name].float()) for name, tensor in before.items())
        kept = written / "generation_config.json"
        assert (kept.read_bytes() if kept.is_file() else None) == generation
        first, second = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (base, written)
        )
        kit.assert_same(first, second)
