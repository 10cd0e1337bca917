"""The example's model and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from meshrl.core.config.shared import ModelConfig
from meshrl.models.load import load_model, load_tokenizer
from meshrl_examples.model import create_model, create_tokenizer

TOKENIZER = create_tokenizer()
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda t: "<|" not in t),
        }
    ),
    min_size=1,
    max_size=5,
)


def render(conversation: list[dict[str, str]], *, generation: bool = False) -> list[int]:
    token_ids: list[int] = TOKENIZER.apply_chat_template(
        conversation, add_generation_prompt=generation, return_dict=False
    )
    return token_ids


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda text: "<|" not in text))
def test_any_text_comes_back_and_costs_a_token_a_byte(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) == len(text.encode())
    assert TOKENIZER.decode(token_ids) == text


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(messages)
def test_first_messages_are_a_prefix_of_the_whole_conversation(conversation: list[dict[str, str]]) -> None:
    whole = render(conversation)
    for count in range(1, len(conversation)):
        shorter = render(conversation[:count])
        assert whole[: len(shorter)] == shorter
        if conversation[count]["role"] == "assistant":
            prompt = render(conversation[:count], generation=True)
            assert whole[: len(prompt)] == prompt


def test_chat_is_written_as_chatml_with_one_token_a_header() -> None:
    token_ids = render([{"role": "user", "content": "The user"}], generation=True)
    assert TOKENIZER.decode(token_ids) == "<|im_start|>user\nThe user<|im_end|>\n<|im_start|>assistant\n"
    assert len(token_ids) == 1 + len("The user") + 2 + 1


def test_model_has_the_promised_size_and_loads_with_its_tokenizer(tmp_path: Path) -> None:
    create_model(tmp_path, seed=0)
    model = load_model(ModelConfig(name=str(tmp_path), device="cpu"))
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path)))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_seed_decides_the_weights_and_leaves_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        create_model(tmp_path / name, seed=seed, hidden_size=32, num_layers=1)
    assert torch.rand(3) == pytest.approx(expected)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
