"""Every family that transformers lists for causal LMs is trained and sampled as its plain forward says, or refused."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from family_checks import ATOL_NATS, check_family, engine_result, trainer_result
from meshrl.core.config.shared import ModelConfig
from meshrl.models.families import REFUSED_TYPES
from meshrl.models.load import ModelError, empty_model, load_model
from tiny_families import FAMILIES, NEEDS_MORE, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about attention that it does not set

RECOMPUTED = {"falcon", "llama4_text", "bloom", "mpt", "gptj", "codegen", "mamba", "qwen3_next"}
IN_SLOTS = {"llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "mistral", "phi3", "olmo2"}


def test_the_list_is_long_enough_to_mean_something() -> None:
    assert len(set(FAMILIES) - NEEDS_MORE.keys() - REFUSED_TYPES.keys()) >= 160
    assert REFUSED_TYPES.keys() <= set(FAMILIES)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NEEDS_MORE])
def test_family_is_right_or_refused(family: str) -> None:
    result = check_family(family)
    for part in (result.engine, result.trainer):
        assert part.way == "refused" or part.apart <= ATOL_NATS, f"{family}: {part}"
    if family in IN_SLOTS:
        assert (result.engine.way, result.trainer.way) == ("slots", "packed")
    if family in RECOMPUTED:
        assert (result.engine.way, result.trainer.way) == ("recomputed", "padded")
    assert (result.engine.way == "refused") == (family in REFUSED_TYPES)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "falcon", "bloom", "mamba", "llama4_text"])
def test_model_of_a_folder_is_loaded_with_an_attention_that_it_has(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    config = ModelConfig(name=str(tmp_path), device="cpu")
    assert trainer_result(load_model(config), plain).apart <= ATOL_NATS
    assert engine_result(load_model(config), plain).apart <= ATOL_NATS
    assert empty_model(config, dtype=torch.float32).device.type == "meta"


@pytest.mark.parametrize("family", ["xlnet", "bert", "gemma3_text"])
def test_model_that_looks_ahead_is_refused_at_load(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    ahead = {"bert": {"is_decoder": False}, "gemma3_text": {"use_bidirectional_attention": True}}.get(family, {})
    (tmp_path / "config.json").write_text(json.dumps(stored | ahead))
    with pytest.raises(ModelError, match=f"of type '{family}', .*not supported: .* on later tokens; take"):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"))


def test_rotary_embeddings_that_grow_with_a_sequence_are_those_of_each_sequence_alone() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    grown = {"rope_parameters": rope | factors, "original_max_position_embeddings": 8}
    plain = tiny_model("phi3", **grown)
    trainer = trainer_result(tiny_model("phi3", None, **grown), plain)
    engine = engine_result(tiny_model("phi3", None, **grown), plain)
    assert (trainer.way, engine.way) == ("packed", "recomputed")
    assert max(trainer.apart, engine.apart) <= ATOL_NATS
