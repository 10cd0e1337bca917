"""Turns conversations into token ids with a mask of what is learned; between data and batches.

The chat template must have the prefix property: the tokens of the first k messages are a prefix of the tokens of all.
Only then is it certain which tokens a message contributed.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshrl.algorithms.packing import TrainSample
from meshrl.sft.data import Conversation, DataError


def tokenize(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, learned_roles: frozenset[str]
) -> TrainSample:
    """Tokens of a conversation; the loss mask covers the learned messages up to and including their end-of-turn token.

    An assistant's header, which generation starts after, is not learned. Raises DataError where the template lacks the
    prefix property or the tokenizer has no template.
    """
    whole = _render(tokenizer, conversation, len(conversation.messages))
    mask = np.zeros(len(whole), dtype=np.bool_)
    end = 0
    for index, message in enumerate(conversation.messages):
        start, end = end, len(whole)
        if index < len(conversation.messages) - 1:
            end = _checked(_render(tokenizer, conversation, index + 1), conversation, index, whole)
        if index >= conversation.learn_from and message["role"] in learned_roles:
            if message["role"] == "assistant" and index == 0:
                start = 0
            elif message["role"] == "assistant":  # after its header
                start = _checked(_render(tokenizer, conversation, index, generation=True), conversation, index, whole)
            mask[start : _end_of_turn(whole, start, end, tokenizer.eos_token_id)] = True
    return TrainSample(
        token_ids=np.array(whole, dtype=np.int32), loss_mask=mask, logprobs=np.zeros(len(whole), dtype=np.float32)
    )


def _render(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, count: int, *, generation: bool = False
) -> list[int]:
    messages = conversation.messages[:count]
    try:
        token_ids: list[int] = tokenizer.apply_chat_template(
            list(messages),
            tools=list(conversation.tools) or None,
            add_generation_prompt=generation,
            return_dict=False,
            **conversation.template_options,
        )
    except ValueError as error:  # what transformers raises when there is no template
        raise DataError(f"row {conversation.row}: the tokenizer cannot render messages: {error}") from error
    return token_ids


def _checked(prefix: list[int], conversation: Conversation, index: int, whole: list[int]) -> int:
    if whole[: len(prefix)] != prefix:
        raise DataError(
            f"row {conversation.row}, message {index}: the chat template lacks the prefix property (the tokens of the "
            "first messages are not a prefix of the whole conversation's), so the loss mask would be wrong; use a "
            "template that renders each message the same wherever it stands"
        )
    return len(prefix)


def _end_of_turn(whole: list[int], start: int, end: int, eos_token_id: int | None) -> int:
    """What a template writes after the end of a turn is never generated, so it is not learned."""
    for position in range(end - 1, start - 1, -1):
        if whole[position] == eos_token_id:
            return position + 1
    return end
