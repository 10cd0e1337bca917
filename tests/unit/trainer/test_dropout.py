"""Engines sample without dropout, so the logprobs of a step are those without it."""

from typing import Any

import pytest
import torch

from meshrl.models.lora import adapted_layers
from meshrl.trainer.build import switch_dropout_off
from tiny_families import tiny_model
from trained import apply_lora


@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        ("gpt2", {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.4}),
        ("opt", {"dropout": 0.4, "attention_dropout": 0.4, "layerdrop": 0.4}),
        ("bloom", {"hidden_dropout": 0.4, "attention_dropout": 0.4}),
        ("phi", {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attention_dropout": 0.4}),
        ("qwen3_moe", {"attention_dropout": 0.4}),
    ],
)
def test_a_model_in_training_computes_what_it_samples_by(family: str, dropout: dict[str, Any]) -> None:
    model, token_ids = tiny_model(family, None, **dropout).train(), torch.arange(1, 17)[None]
    with torch.no_grad():
        assert not torch.equal(model(token_ids).logits, model(token_ids).logits)
        switch_dropout_off(model)
        torch.testing.assert_close(model(token_ids).logits, model.eval()(token_ids).logits)


def test_adapters_keep_the_dropout_that_was_asked_for() -> None:
    model = tiny_model("qwen3_moe", None, attention_dropout=0.4)
    apply_lora(model, rank=2, alpha=4.0, dropout=0.3, target_modules=("q_proj",))
    switch_dropout_off(model)
    assert {layer.dropout for layer in adapted_layers(model).values()} == {0.3}
