"""The forward pass over the slot cache: what it computes for models of several kinds, and after new weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from inference_kit import VOCAB, EngineFactory, ask, complete, full_forward, make_model
from meshrl.inference.engine import HostVersion
from meshrl.models.state import hf_state

SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def other_models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return {
        "llama with biases": LlamaForCausalLM(LlamaConfig(**SETTINGS, attention_bias=True, mlp_bias=True)).eval(),
        "llama with yarn": LlamaForCausalLM(LlamaConfig(**SETTINGS, rope_parameters=yarn)).eval(),
        "qwen2 with a window": Qwen2ForCausalLM(Qwen2Config(**SETTINGS, **windows)).eval(),
    }


@pytest.mark.parametrize("name", other_models())
async def test_models_of_the_same_kind_match_a_full_forward(name: str, start_engine: EngineFactory) -> None:
    model = other_models()[name]
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            torch.nn.init.normal_(module.bias)
    engine = await start_engine(model, max_model_len=64)
    made = await complete(engine, ask([3, 1, 4, 1, 5], max_tokens=40))
    model.set_attn_implementation("eager")
    expected = full_forward(model, [3, 1, 4, 1, 5], made.token_ids.tolist())
    np.testing.assert_allclose(made.logprobs, expected, atol=1e-4)


async def test_every_new_version_is_sampled_from(start_engine: EngineFactory) -> None:
    engine = await start_engine(make_model(seed=1))
    for version in (1, 2, 3):
        other = make_model(seed=10 + version)
        await engine.stage(HostVersion(version=version, tensors=hf_state(other)))
        await engine.pause()
        await engine.apply(version, b"root")
        await engine.resume()
        made = await complete(engine, ask([1, 2, 3], max_tokens=12))
        expected = full_forward(other, [1, 2, 3], made.token_ids.tolist())
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4)
