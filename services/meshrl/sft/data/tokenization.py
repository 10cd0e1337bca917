"""Turns conversations into token ids with a mask of the learned ones.

These are found by the configured renderer, the `generation` marks of the chat template, prefixes of the conversation,
or the renderer that makes the template's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from meshrl.algorithms.packing import TrainSample
from meshrl.models.renderers import RendererError
from meshrl.sft.data.conversations import Conversation, DataError
from meshrl.sft.data.rendering import MatchingRenderers, Renderers
from meshrl.sft.data.template_masks import PrefixError, TemplateMasks


class ConversationTokenizer:
    """`ways` counts rows by how their learned text was found."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, renderers: Renderers | None, *, learned_roles: frozenset[str]
    ) -> None:
        self.tokenizer = tokenizer
        self._renderers = renderers
        self._learned_roles = learned_roles
        self._masks = TemplateMasks(tokenizer)
        self._matching = MatchingRenderers(tokenizer)
        self.ways: dict[str, int] = {}

    def __call__(self, conversation: Conversation) -> TrainSample:
        """Raises DataError for a conversation that cannot be rendered, or whose learned tokens are not certain."""
        learned = conversation.learned(self._learned_roles)
        if self._renderers is not None:
            self._count(f"the renderer {self._renderers.name}")
            return _sample(*_rendered(conversation, self._renderers, learned))
        found = self._masks.by_marks(conversation, learned) if self._masks.has_marks else None
        if found is not None:
            self._count("the generation marks of the chat template")
            return _sample(*found)
        try:
            found = self._masks.by_prefixes(conversation, learned)
        except PrefixError:
            renderers = self._matching.of(conversation, self._masks.whole(conversation))
            if renderers is None:
                raise
            self._count(f"the renderer {renderers.name}, which makes the tokens of the chat template")
            return _sample(*_rendered(conversation, renderers, learned))
        self._count("prefixes that the chat template renders")
        return _sample(*found)

    def _count(self, way: str) -> None:
        self.ways[way] = self.ways.get(way, 0) + 1


def _rendered(
    conversation: Conversation, renderers: Renderers, learned: Sequence[bool]
) -> tuple[list[int], NDArray[np.bool_]]:
    """Raises DataError.

    An assistant's text is learned with its end-of-turn token, of other roles the text without its markup.
    """
    from renderers import build_training_sample

    roles = {message["role"] for message, learns in zip(conversation.messages, learned, strict=True) if learns}
    try:
        rendered = build_training_sample(
            renderers.of(conversation.template_options),
            [dict(message) for message in conversation.messages],
            role_to_mask=lambda message: message["role"] in roles,
            tools=[dict(tool) for tool in conversation.tools] or None,
            content_sft_roles=roles - {"assistant"},
            ensure_final_stop=True,
            message_loss_mask=list(learned),
        )
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:  # by what a message lacks
        why = error.why if isinstance(error, RendererError) else error
        raise DataError(f"{conversation.row}: the renderer cannot render it: {why}") from error
    return list(rendered.token_ids), np.array(rendered.loss_mask, dtype=np.bool_)


def _sample(token_ids: list[int], mask: NDArray[np.bool_]) -> TrainSample:
    return TrainSample(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
    )


def shown(sample: TrainSample, tokenizer: PreTrainedTokenizerBase) -> str:
    """A sample's text, with its learned parts between [[ and ]]."""
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8)))
    pieces = np.split(np.arange(len(sample.token_ids)), edges + 1)
    texts = [tokenizer.decode(sample.token_ids[piece].tolist(), skip_special_tokens=False) for piece in pieces]
    marked = [sample.loss_mask[piece].any() for piece in pieces]
    return "".join(f"[[{text}]]" if learned else text for text, learned in zip(texts, marked, strict=True))
