"""Text in and out of token ids for the OpenAI routes: prompts through the chat template, completions piece by piece."""

from __future__ import annotations

import codecs
import inspect
from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from transformers import PreTrainedTokenizerBase

from meshrl.core.chat_messages import apply_chat_template, normal_message
from meshrl.inference.http.chat_replies import ChatReplies
from meshrl.inference.http.token_bytes import TokenBytes
from meshrl.inference.http.tokenizer_pool import TokenizerPool
from meshrl.wire.errors import MeshError, Reason

MAX_PROMPT_BYTES = 2**20
WORKERS = 2
ENCODE_LIMIT_S = 10.0

_INCOMPLETE = "\ufffd"  # what half a character is decoded to
_MOST_HELD = 4
"""A character has at most four bytes: this many tokens cannot all be parts of an incomplete one."""

_FOREIGN_ARGUMENTS = frozenset({"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters})
_TEMPLATE_ARGUMENTS = frozenset({"documents", "chat_template"})  # of those, what a request may bring


class TextCodec:
    """`replies`: None for a model without a parser. A request's chat template, which is a program, is run only with
    `trust_request_chat_template`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_prompt_bytes: int = MAX_PROMPT_BYTES,
        encode_limit_s: float = ENCODE_LIMIT_S, trust_request_chat_template: bool = False,
        replies: ChatReplies | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.bytes = TokenBytes(tokenizer)
        self.replies = replies
        self._max_prompt_bytes = max_prompt_bytes
        self._trust_request_chat_template = trust_request_chat_template
        self._pool = TokenizerPool(tokenizer, workers=WORKERS, limit_s=encode_limit_s)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text beside the model's own."""
        own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        return own if self.replies is None else (*own, *self.replies.stop_token_ids)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Raises MeshError INVALID_REQUEST for a prompt that is too long, in bytes or to tokenize."""
        self._check_size(text)
        return await self._pool.run(lambda tokenizer: _ids(tokenizer, text, add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        *,
        arguments: Mapping[str, JsonValue],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, JsonValue]] = (),
    ) -> tuple[int, ...]:
        """Token ids of a conversation with its tools; `arguments` go to the chat template under their names.

        Raises MeshError INVALID_REQUEST for a message that no text model reads, a template that fails or is missing,
        and too long a prompt.
        """
        if arguments.get("chat_template") is not None and not self._trust_request_chat_template:
            raise MeshError(
                Reason.INVALID_REQUEST,
                "chat_template: a template is a program, and this server runs only its own; leave it out, or start the "
                "server with inference.trust_request_chat_template",
            )
        foreign = sorted((_FOREIGN_ARGUMENTS - _TEMPLATE_ARGUMENTS) & set(arguments))
        if foreign:
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"chat_template_kwargs cannot set {', '.join(foreign)}; leave it out there, and use the request's own "
                "field of that name where there is one",
            )
        self._check_size([list(messages), list(tools), dict(arguments)])
        normal = []
        for place, message in enumerate(messages):
            try:
                normal.append(normal_message(message))
            except ValueError as error:
                raise MeshError(Reason.INVALID_REQUEST, f"messages[{place}]: {error}") from error

        def work(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
            try:
                text = apply_chat_template(
                    tokenizer, normal, tools=list(tools) or None, tokenize=False,
                    add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                    **arguments,
                )  # fmt: skip
            except Exception as error:  # a template is a program over what the client sent, so it may raise anything
                raise MeshError(
                    Reason.INVALID_REQUEST, f"the chat template cannot render these messages: {error!r}"
                ) from error
            self._check_size(text)
            return _ids(tokenizer, text, add_special_tokens=False)

        return await self._pool.run(work)

    def _check_size(self, value: object) -> None:
        size = _text_bytes(value)
        if size > self._max_prompt_bytes:
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"the prompt's text has {size} bytes, this server tokenizes at most {self._max_prompt_bytes}; send "
                "less, send token ids, or start the server with a larger inference.max_prompt_bytes",
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _text_bytes(value: object) -> int:
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, Mapping):
        return sum(_text_bytes(key) + _text_bytes(item) for key, item in value.items())
    return sum(map(_text_bytes, value)) if isinstance(value, list) else 0


class TextStream:
    """Turns tokens that arrive over time into text, and ends it before a stop string.

    Text that may still change stays back: half a character, or the beginning of a stop string. A stop string that ends
    in the text of the first `min_tokens` is none.
    """

    def __init__(
        self, codec: TextCodec, *, skip_special_tokens: bool, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self.stopped_by: str | None = None
        self._stops, self._unstopped = tuple(stops), min_tokens
        self._pieces = (_JoinedBytes if codec.bytes.joins else _Window)(codec, skip_special_tokens)
        self._held = ""

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        if self.stopped:
            return ""
        early = min(len(token_ids), self._unstopped)
        self._unstopped -= early
        if early:
            self._held += self._pieces.push(token_ids[:early], last=False)
        before = len(self._held)
        self._held += self._pieces.push(token_ids[early:], last)
        for stop in self._stops:
            at = self._held.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self.stopped_by = stop
                self._held = self._held[:at]
        if last or self.stopped:
            ready, self._held = self._held, ""
            return ready
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready


class _JoinedBytes:
    """The text of tokens whose bytes join to it. Bytes that are no text become U+FFFD at once."""

    def __init__(self, codec: TextCodec, skip_special_tokens: bool) -> None:
        self._bytes = codec.bytes
        self._skipped = codec.bytes.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = codec.bytes.strips_first_space

    def push(self, token_ids: Sequence[int], last: bool) -> str:
        raw = b"".join(self._bytes.of(token) for token in token_ids if token not in self._skipped)
        text = self._decoder.decode(raw, last)
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _Window:
    """The text of tokens that only their tokenizer decodes, the newest together with those before them."""

    def __init__(self, codec: TextCodec, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: Sequence[int], last: bool) -> str:
        self._new += token_ids
        before, now = self._decode(self._context), self._decode([*self._context, *self._new])
        half = now.endswith(_INCOMPLETE) and len(self._new) < _MOST_HELD
        if len(now) <= len(before) or (half and not last):
            return ""
        self._context, self._new = self._new, []
        return now[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
