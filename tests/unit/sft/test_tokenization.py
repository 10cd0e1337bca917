"""Which tokens of a conversation are learned."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from meshrl.sft.data.conversations import Conversation, DataError
from meshrl.sft.data.tokenization import ConversationTokenizer
from meshrl_examples.model import create_tokenizer

MESSAGES = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "cd"},
    {"role": "assistant", "content": "dc"},
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return create_tokenizer()


def learned(tokenizer: Any, conversation: Conversation, *roles: str) -> str:
    sample = ConversationTokenizer(tokenizer, None, learned_roles=frozenset(roles))(conversation)
    text: str = tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    return text


def test_assistant_turns_are_learned_with_their_end_and_without_their_header(tokenizer: Any) -> None:
    conversation = Conversation(row="row 0", messages=MESSAGES)
    assert learned(tokenizer, conversation, "assistant") == "ba<|im_end|>dc<|im_end|>"


def test_prompt_is_context_whatever_its_roles(tokenizer: Any) -> None:
    conversation = Conversation(row="row 0", messages=MESSAGES, learn_from=3)
    assert learned(tokenizer, conversation, "assistant") == "dc<|im_end|>"


def test_other_roles_are_learned_on_request(tokenizer: Any) -> None:
    conversation = Conversation(row="row 0", messages=MESSAGES[:2])
    assert learned(tokenizer, conversation, "user") == "<|im_start|>user\nab<|im_end|>"


def test_tokens_are_those_of_the_chat_template(tokenizer: Any) -> None:
    sample = ConversationTokenizer(tokenizer, None, learned_roles=frozenset({"assistant"}))(
        Conversation(row="row 0", messages=MESSAGES)
    )
    assert sample.token_ids.tolist() == tokenizer.apply_chat_template(list(MESSAGES), return_dict=False)


def test_a_template_without_the_prefix_property_is_refused() -> None:
    forgetful = create_tokenizer()
    forgetful.chat_template = (
        "{% for message in messages %}{% if message['role'] != 'assistant' or loop.last %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(DataError, match=r"row 7, message 2 \(assistant\): the chat template lacks the prefix property"):
        ConversationTokenizer(forgetful, None, learned_roles=frozenset({"assistant"}))(
            Conversation(row="row 7", messages=MESSAGES)
        )


def test_a_tokenizer_without_a_template_is_refused() -> None:
    bare = create_tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match="row 0: the tokenizer cannot render messages"):
        ConversationTokenizer(bare, None, learned_roles=frozenset({"assistant"}))(
            Conversation(row="row 0", messages=MESSAGES)
        )
