import torch
from transformers import Qwen3ForCausalLM

from meshrl.models.state import gather_state, hf_state
from tiny_qwen3 import tiny_qwen3


def build(*, tied: bool, seed: int = 0) -> Qwen3ForCausalLM:
    return tiny_qwen3(seed, tie_word_embeddings=tied)


def test_names_are_sorted_and_those_of_the_checkpoint() -> None:
    names = list(hf_state(build(tied=False)))
    assert names == sorted(names)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_norm.weight"} <= set(names)


def test_tied_head_appears_once() -> None:
    names = hf_state(build(tied=True)).keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_state_shares_memory_and_snapshot_does_not() -> None:
    model = build(tied=True)
    live, copy = hf_state(model), gather_state(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(7.0)
    assert live["model.norm.weight"].tolist() == [7.0] * 16
    assert copy["model.norm.weight"].tolist() == [1.0] * 16


def test_snapshot_converts_floats() -> None:
    assert {tensor.dtype for tensor in gather_state(build(tied=True), torch.bfloat16).values()} == {torch.bfloat16}


def test_loaded_state_makes_models_equal() -> None:
    source, target = build(tied=True, seed=1), build(tied=True, seed=2)
    target.load_state_dict(hf_state(source), strict=False)  # the tied head is not named twice
    ids = torch.arange(8)[None]
    torch.testing.assert_close(target(ids).logits, source(ids).logits, atol=0, rtol=0)
