"""Finds the learned tokens among those that a chat template made of a conversation.

A template with `generation` marks has the answer. Of any other the prefixes that bound a learned message are rendered:
the messages before it with the generation prompt, and the messages up to it. Both must begin the whole conversation, or
it is not certain which tokens are the message's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from meshrl.core.chat_messages import apply_chat_template
from meshrl.sft.data.conversations import Conversation, DataError, Message

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE, _REPLY = "meshrl asks", "meshrl answers"
"""Texts of a made-up conversation that shows how a template ends an assistant's turn."""
_PROBE_CALL = "meshrl_calls"
_SHOWN = 24  # characters of a generation prompt that an error shows
_WAYS_OUT = (
    "two ways to mend it: the renderer of the model's family, such as --renderer.name qwen3 (or qwen3.5, glm-4.5,"
    " deepseek-r1, gpt-oss, llama-3), which needs no such template; or a template that renders each message the same"
    " wherever it stands, such as --tokenizer.chat-template qwen3, which keeps the thinking"
)


class PrefixError(DataError):
    """A prefix of a conversation renders otherwise than the whole, or not at all."""


@dataclass(frozen=True, kw_only=True)
class _Turn:
    end: int | None = None
    ends_with_header: bool = False


class TemplateMasks:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.has_marks = isinstance(tokenizer.chat_template, str) and bool(_MARKS.search(tokenizer.chat_template))
        self._special = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        ) | frozenset(tokenizer.all_special_ids)
        self._turns: dict[str, _Turn] = {}
        self._written: dict[str, bool] = {}
        self._warned: set[str] = set()

    def whole(self, conversation: Conversation) -> list[int]:
        """Raises DataError if the template does not take the messages."""
        self._check_calls(conversation)
        try:
            return self._render(conversation, conversation.messages)
        # No template, or one that does not take the messages (Jinja's errors are plain exceptions of many kinds).
        except Exception as error:
            raise DataError(f"{conversation.row}: the tokenizer cannot render messages: {error}") from error

    def _check_calls(self, conversation: Conversation) -> None:
        template = self._tokenizer.chat_template
        for place, message in enumerate(conversation.messages):
            if not message.get("tool_calls"):
                continue
            told, beside = bool(message["content"]), ""
            if isinstance(template, str) and "tool_calls" in template:
                if self._writes_calls(conversation, beside_text=told):
                    continue
                beside = " beside the message's text" if told else ""
            raise DataError(
                f"{conversation.row}, message {place}: calls tools, which the chat template leaves out{beside}; give"
                " tokenizer.chat_template one that writes tool_calls, or take the calls out of the data"
            )

    def _writes_calls(self, conversation: Conversation, *, beside_text: bool) -> bool:
        key = f"{beside_text} {sorted(conversation.template_options.items())!r}"
        if key not in self._written:
            call = {"id": "call_0", "type": "function", "function": {"name": _PROBE_CALL, "arguments": {}}}
            reply = {"role": "assistant", "content": _REPLY if beside_text else "", "tool_calls": [call]}
            try:
                text: str = self._apply(conversation, [{"role": "user", "content": _PROBE}, reply], tokenize=False)
            except Exception:  # noqa: BLE001  # a template that needs more than a question
                self._written[key] = True
            else:
                self._written[key] = _PROBE_CALL in text
        return self._written[key]

    def by_marks(
        self, conversation: Conversation, learned: Sequence[bool]
    ) -> tuple[list[int], NDArray[np.bool_]] | None:
        """Tokens and (T,) mask by the template's marks. None where other roles are learned, or the number of marked
        spans is not that of the assistant's messages."""
        roles = [message["role"] for message in conversation.messages]
        if any(learns and role != "assistant" for learns, role in zip(learned, roles, strict=True)):
            return None
        self._check_calls(conversation)
        whole, marked = self._marked(conversation)
        edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        answers = [index for index, role in enumerate(roles) if role == "assistant"]
        if len(runs) != len(answers):
            return None
        mask = np.zeros(len(whole), dtype=np.bool_)
        for index, (start, end) in zip(answers, runs, strict=True):
            last = self._behind_special(whole, start, end)
            mask[start : last or end] = learned[index]
            if last is None and end < len(whole) and whole[end] in self._special:
                self._warn(
                    f"the generation marks of the chat template end before {self._text(whole[end : end + 1])!r}, so the"
                    " end of a turn is not learned; move endgeneration behind it"
                )
        return whole, mask

    def by_prefixes(self, conversation: Conversation, learned: Sequence[bool]) -> tuple[list[int], NDArray[np.bool_]]:
        """Tokens and (T,) mask of the learned messages, each without its header and with the token that ends its turn.

        If the next message's header ends a turn, that is the first token of the header; after the last message the
        tokenizer's end-of-text token is appended. Raises PrefixError.
        """
        messages = conversation.messages
        whole = self.whole(conversation)
        mask = np.zeros(len(whole), dtype=np.bool_)
        for first, last in _blocks(messages):
            if not any(learned[first:last]):
                continue
            if not all(learned[first:last]):
                raise DataError(
                    f"{conversation.row}, messages {first} to {last - 1}: results of tools that stand in one block are"
                    " learned together; give all of them the same mark"
                )
            own = messages[first]["role"] == "assistant"  # which has a header, also as the first message
            start = self._bound(conversation, first, whole, bounds=first, generation=own) if first or own else 0
            end = len(whole) if last == len(messages) else self._bound(conversation, last, whole, bounds=first)
            turn = self._turn(conversation)
            if own and turn.ends_with_header:
                if end < len(whole):
                    end += whole[end] in self._special
                elif self._tokenizer.eos_token_id is not None:
                    whole, mask, end = [*whole, self._tokenizer.eos_token_id], np.append(mask, False), end + 1
                mask[start:end] = True
            else:
                mask[start : self._turn_end(whole, start, end, turn.end)] = True
        return whole, mask

    def _bound(
        self, conversation: Conversation, count: int, whole: list[int], *, bounds: int, generation: bool = False
    ) -> int:
        """Tokens of the first `count` messages, which must begin the whole but for a template's closing text."""
        where = f"{conversation.row}, message {bounds} ({conversation.messages[bounds]['role']})"
        if not count and generation:
            return self._first_header(conversation, whole)
        try:
            prefix = self._render(conversation, conversation.messages[:count], generation=generation)
        except Exception as error:  # as in whole
            raise PrefixError(
                f"{where}: the chat template cannot render the {count} messages that bound this one by themselves"
                f" ({error}), so its loss mask is not known; {_WAYS_OUT}"
            ) from error
        common = _common(prefix, whole)
        if common == len(prefix) or (not generation and self._closes(prefix[common:])):
            return common
        if generation:
            without, after = (self._render(conversation, conversation.messages[:each]) for each in (count, count + 1))
            without, after = without[: _common(without, whole)], after[_common(after, whole) :]
            if self._closes(after):  # the message is as in the whole, so the prompt is to blame
                raise PrefixError(
                    f"{where}: the generation prompt of the chat template, which ends in"
                    f" {self._text(prefix)[-_SHOWN:]!r}, does not begin the message as the template renders it,"
                    f" {self._text(whole[len(without) :])[: 2 * _SHOWN]!r}, so the loss mask would be wrong;"
                    f" {_WAYS_OUT}"
                )
        raise PrefixError(
            f"{where}: the chat template lacks the prefix property (it renders the conversation up to this message"
            " otherwise than at the beginning of the whole, as Qwen3's does when it strips the thinking of earlier"
            f" turns), so the loss mask would be wrong; {_WAYS_OUT}"
        )

    def _first_header(self, conversation: Conversation, whole: list[int]) -> int:
        asked = [{"role": "user", "content": _PROBE}]
        try:
            before = self._render(conversation, asked)
            header = self._render(conversation, asked, generation=True)[len(before) :]
        except Exception:  # noqa: BLE001  # a template that needs more than a question: its header is learned
            return 0
        for start in range(len(whole) - len(header)):
            if header and whole[start : start + len(header)] == header:
                return start + len(header)
        return 0

    def _turn(self, conversation: Conversation) -> _Turn:
        key = repr(sorted(conversation.template_options.items()))
        if key not in self._turns:
            self._turns[key] = self._probe(conversation)
        return self._turns[key]

    def _probe(self, conversation: Conversation) -> _Turn:
        talk: list[Message] = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _REPLY}]
        try:
            alone, followed = (self._behind_reply(conversation, each) for each in (talk, [*talk, talk[0]]))
        except Exception:  # noqa: BLE001  # a template with other needs: its turns are taken to have an end of their own
            return _Turn()
        ends = [token for token in alone if token in self._special]
        if ends:
            return _Turn(end=ends[0])
        if followed and followed[0] in self._special:
            return _Turn(ends_with_header=True)
        self._warn("the chat template ends an assistant's turn without a special token, so no end of turn is learned")
        return _Turn()

    def _behind_reply(self, conversation: Conversation, messages: Sequence[Message]) -> list[int]:
        text: str = self._apply(conversation, messages, tokenize=False)
        behind = text.rpartition(_REPLY)[2]
        return list(self._tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"]) if behind else []

    def _turn_end(self, whole: list[int], start: int, end: int, token: int | None) -> int:
        """Behind the token that ends a turn.

        That is `token`; in a turn without it, such as one that calls tools, the last special token but for white space;
        elsewhere the one that follows the turn, or the end-of-text token in it.
        """
        if token is not None and token in whole[start:end]:
            return _last(whole, token, start, end)
        last = self._behind_special(whole, start, end)
        if last is not None:
            return last
        if token is not None and end < len(whole) and whole[end] in self._special:
            return end + 1
        stop = self._tokenizer.eos_token_id
        return _last(whole, stop, start, end) if stop in whole[start:end] else end

    def _behind_special(self, whole: list[int], start: int, end: int) -> int | None:
        """As `_turn_end`; None without a special token."""
        while end > start + 1 and whole[end - 1] not in self._special and self._is_blank(whole[end - 1]):
            end -= 1
        return end if end > start and whole[end - 1] in self._special else None

    def _closes(self, token_ids: list[int]) -> bool:
        return all(token in self._special or self._is_blank(token) for token in token_ids)

    def _is_blank(self, token_id: int) -> bool:
        return not self._text([token_id]).strip()

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], *, generation: bool = False
    ) -> list[int]:
        token_ids: list[int] = self._apply(conversation, messages, add_generation_prompt=generation, return_dict=False)
        return token_ids

    def _marked(self, conversation: Conversation) -> tuple[list[int], NDArray[np.bool_]]:
        try:
            encoded = self._apply(
                conversation, conversation.messages, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # as in whole
            raise DataError(f"{conversation.row}: the tokenizer cannot render messages: {error}") from error
        return list(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=np.bool_)

    def _apply(self, conversation: Conversation, messages: Sequence[Message], **options: Any) -> Any:
        return apply_chat_template(
            self._tokenizer,
            messages,
            tools=list(conversation.tools) or None,
            **options,
            **conversation.template_options,
        )

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("{}", text)


def _blocks(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Each message its own, but for the results of one turn's calls."""
    first = 0
    for index, message in enumerate(messages):
        following = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if not message["role"] == following == "tool":
            yield first, index + 1
            first = index + 1


def _common(prefix: Sequence[int], whole: Sequence[int]) -> int:
    differing = (place for place, (one, other) in enumerate(zip(prefix, whole, strict=False)) if one != other)
    return next(differing, min(len(prefix), len(whole)))


def _last(whole: Sequence[int], token: int, start: int, end: int) -> int:
    return max(place for place in range(start, end) if whole[place] == token) + 1
