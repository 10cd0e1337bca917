"""Turns conversations into token ids with a mask of what is learned; between data and batches.

Two ways. A chat template must have the prefix property: the tokens of the first k messages are a prefix of the tokens
of all. Only then is it certain which tokens a message contributed. A renderer says itself which message each token is
of and whether the model would have sampled it, so templates that render a message differently by its place will do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from meshrl.algorithms.packing import TrainSample
from meshrl.sft.data.conversations import Conversation, DataError
from meshrl.sft.data.rendering import Renderers


class ConversationTokenizer:
    """Tokenizes the conversations of a run, by a renderer where there is one and by the chat template elsewhere."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, renderers: Renderers | None, *, learned_roles: frozenset[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._renderers = renderers
        self._learned_roles = learned_roles

    def __call__(self, conversation: Conversation) -> TrainSample:
        """Raises DataError for a conversation that cannot be rendered."""
        if self._renderers is None:
            return tokenize(conversation, self._tokenizer, learned_roles=self._learned_roles)
        return render(conversation, self._renderers, learned_roles=self._learned_roles)


def render(conversation: Conversation, renderers: Renderers, *, learned_roles: frozenset[str]) -> TrainSample:
    """Tokens of a conversation by its renderer.

    Of an assistant's message what the model samples is learned, its end-of-turn token included, also where the template
    leaves the last one out; of other roles the text alone, without the markup around it. Raises DataError.
    """
    from renderers import build_training_sample

    learned = [
        index >= conversation.learn_from and message["role"] in learned_roles
        for index, message in enumerate(conversation.messages)
    ]
    try:
        rendered = build_training_sample(
            renderers.of(conversation.template_options),
            [dict(message) for message in conversation.messages],
            role_to_mask=lambda message: message["role"] in learned_roles,
            tools=[dict(tool) for tool in conversation.tools] or None,
            content_sft_roles=learned_roles - {"assistant"},
            ensure_final_stop=True,
            message_loss_mask=learned,
        )
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:  # by what a message lacks
        raise DataError(f"{conversation.row}: the renderer cannot render it: {error}") from error
    return _sample(rendered.token_ids, np.array(rendered.loss_mask, dtype=np.bool_))


def tokenize(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, learned_roles: frozenset[str]
) -> TrainSample:
    """Tokens of a conversation by the chat template; the loss mask covers the learned messages up to and including
    their end-of-turn token.

    An assistant's header, which generation starts after, is not learned. Raises DataError where the template lacks the
    prefix property or the tokenizer has no template.
    """
    messages = conversation.messages
    whole = _render(tokenizer, conversation, len(messages))
    mask = np.zeros(len(whole), dtype=np.bool_)
    end = 0
    for index, message in enumerate(messages):
        role, start = message["role"], end
        following = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if role == following == "tool":  # templates put the results of one turn's calls into one block
            continue
        end = len(whole)
        if following is not None:
            end = _checked(_render(tokenizer, conversation, index + 1), conversation, index, whole)
        if index >= conversation.learn_from and role in learned_roles:
            if role == "assistant" and index > 0:  # after its header
                start = _checked(_render(tokenizer, conversation, index, generation=True), conversation, index, whole)
            mask[start : _end_of_turn(whole, start, end, tokenizer)] = True
    return _sample(whole, mask)


def _sample(token_ids: list[int], mask: NDArray[np.bool_]) -> TrainSample:
    return TrainSample(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
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
    # No template, or one that does not take the messages (Jinja's errors are plain exceptions of many kinds).
    except Exception as error:
        raise DataError(f"{conversation.row}: the tokenizer cannot render messages: {error}") from error
    return token_ids


def _checked(prefix: list[int], conversation: Conversation, index: int, whole: list[int]) -> int:
    if whole[: len(prefix)] != prefix:
        message = conversation.messages[index]
        raise DataError(
            f"{conversation.row}, message {index} ({message['role']}): the chat template lacks the prefix property (it"
            " renders the conversation up to this message otherwise than at the beginning of the whole, as Qwen3's does"
            " when it strips the thinking of earlier turns), so the loss mask would be wrong. Two ways to mend it: a"
            " renderer for the model's family, such as --renderer.name qwen3, which needs no such template; or a"
            " template that renders each message the same wherever it stands, such as --tokenizer.chat-template qwen3,"
            " which keeps the thinking"
        )
    return len(prefix)


def _end_of_turn(whole: list[int], start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """What a template writes after the end of a turn is never generated, so it is not learned.

    A base model's end-of-text token ends no turn: there the last special token does.
    """
    for ending in ({tokenizer.eos_token_id}, set(tokenizer.all_special_ids)):
        for position in range(end - 1, start - 1, -1):
            if whole[position] in ending:
                return position + 1
    return end
