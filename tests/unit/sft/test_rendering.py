"""Renderers and chat templates in place of the tokenizer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from chatml_tokenizer import chatml_tokenizer
from meshrl.models.load import ModelError
from meshrl.sft.config import SFTConfig, TokenizerConfig
from meshrl.sft.data.conversations import Conversation, DataError
from meshrl.sft.data.rendering import TEMPLATES, Renderers, load_sft_tokenizer
from meshrl.sft.data.tokenization import ConversationTokenizer
from meshrl.training.model_config import TrainerModelConfig
from meshrl_examples.model import create_model, create_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": n}}} for n in (1, 2)]
MESSAGES = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": CALLS},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "cd"},
    {"role": "assistant", "content": "dc", "reasoning_content": "so"},
)
LEARNED = frozenset({"assistant"})


@pytest.fixture(scope="module")
def qwen() -> PreTrainedTokenizerBase:
    return chatml_tokenizer((TEMPLATES / "qwen3.jinja").read_text())


def learned(tokenizer: Any, sample: Any) -> str:
    text: str = tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    return text


CALLED = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>' for n in (1, 2))


def test_the_template_that_comes_with_sft_keeps_the_thinking_of_all_turns(qwen: Any) -> None:
    sample = ConversationTokenizer(qwen, None, learned_roles=LEARNED)(
        Conversation(row="row 0", messages=MESSAGES, tools=(TOOL,))
    )
    assert learned(qwen, sample) == (
        f"<think>\nwhy\n</think>\n\n{CALLED}<|im_end|><think>\n\n</think>\n\nba<|im_end|>"
        "<think>\nso\n</think>\n\ndc<|im_end|>"
    )


def test_a_renderer_learns_what_the_model_samples_whatever_the_template_does_with_thinking(qwen: Any) -> None:
    conversation = Conversation(row="row 0", messages=MESSAGES, tools=(TOOL,))
    sample = ConversationTokenizer(qwen, Renderers(qwen, {"name": "qwen3"}), learned_roles=LEARNED)(conversation)
    assert learned(qwen, sample) == f"{CALLED}<|im_end|>ba<|im_end|><think>\nso\n</think>\n\ndc<|im_end|>"


def test_of_tools_and_users_a_renderer_learns_the_text_alone(qwen: Any) -> None:
    conversation = Conversation(row="row 0", messages=MESSAGES, tools=(TOOL,))
    renderers = Renderers(qwen, {"name": "qwen3"})
    assert (
        learned(qwen, ConversationTokenizer(qwen, renderers, learned_roles=frozenset({"tool"}))(conversation)) == "34"
    )
    assert (
        learned(qwen, ConversationTokenizer(qwen, renderers, learned_roles=frozenset({"user", "system"}))(conversation))
        == "Sabcd"
    )


def test_chat_template_kwargs_reach_template_and_renderer(qwen: Any) -> None:
    plain = ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"})
    conversation = Conversation(row="row 0", messages=plain, template_options={"enable_thinking": False})
    by_template = ConversationTokenizer(qwen, None, learned_roles=LEARNED)(conversation)
    by_renderer = ConversationTokenizer(qwen, Renderers(qwen, {"name": "qwen3"}), learned_roles=LEARNED)(conversation)
    assert by_template.token_ids.tolist() == by_renderer.token_ids.tolist()
    assert learned(qwen, by_template) == "ba<|im_end|>"  # the empty thinking is part of the prompt
    wrong = Conversation(row="row 3", messages=plain, template_options={"thinking": "no"})
    with pytest.raises(DataError, match="row 3: the renderer cannot render it: Unsupported chat_template_kwargs"):
        ConversationTokenizer(qwen, Renderers(qwen, {"name": "qwen3"}), learned_roles=LEARNED)(wrong)


def test_the_refusal_of_a_template_names_the_message_and_both_ways_out(qwen: Any) -> None:
    forgetful = create_tokenizer()
    forgetful.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.reasoning_content if loop.last else '') "
        "~ m.content ~ (m.tool_calls or '') ~ '<|im_end|>\n' }}{% endfor %}"
    )
    with pytest.raises(DataError) as refused:
        ConversationTokenizer(forgetful, None, learned_roles=LEARNED)(Conversation(row="row 5", messages=MESSAGES[1:]))
    assert str(refused.value).startswith("row 5, message 1 (assistant): the chat template lacks the prefix property")
    assert "--renderer.name qwen3" in str(refused.value)
    assert "--tokenizer.chat-template qwen3" in str(refused.value)


@pytest.mark.parametrize("options", [{"name": "qwen4"}, {"name": "qwen3"}, {"name": "qwen3", "color": "red"}])
def test_a_renderer_that_does_not_exist_or_does_not_fit_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"renderer .* does not fit the tokenizer .* use its chat template"):
        Renderers(create_tokenizer(), options)


def test_a_chat_template_is_taken_by_name_from_a_file_or_as_text(tmp_path: Path) -> None:
    create_model(tmp_path / "model", seed=0, hidden_size=16, num_layers=1)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    model = TrainerModelConfig(name=str(tmp_path / "model"))

    def template(given: str | None) -> object:
        return load_sft_tokenizer(
            SFTConfig(model=model, tokenizer=TokenizerConfig(chat_template=given)).text
        ).chat_template

    assert template("qwen3") == (TEMPLATES / "qwen3.jinja").read_text()
    assert template(str(tmp_path / "mine.jinja")) == "{{ messages[0].content }}"
    assert template("{{ messages }}") == "{{ messages }}"
    assert template(None) == create_tokenizer().chat_template
    with pytest.raises(ModelError, match=r"'qwen5' is neither a template that comes with sft \(qwen3\), nor a file"):
        template("qwen5")


def test_tokens_are_those_of_the_chat_template_and_other_roles_are_learned_with_their_header() -> None:
    tokenizer = create_tokenizer()
    conversation = Conversation(row="row 0", messages=(MESSAGES[0], MESSAGES[1], MESSAGES[5]))
    sample = ConversationTokenizer(tokenizer, None, learned_roles=frozenset({"user"}))(conversation)
    assert sample.token_ids.tolist() == tokenizer.apply_chat_template(list(conversation.messages), return_dict=False)
    assert learned(tokenizer, sample) == "<|im_start|>user\nab<|im_end|>"


def test_a_tokenizer_without_a_template_is_refused() -> None:
    bare = create_tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match="row 0: the tokenizer cannot render messages"):
        ConversationTokenizer(bare, None, learned_roles=LEARNED)(Conversation(row="row 0", messages=MESSAGES[:2]))
