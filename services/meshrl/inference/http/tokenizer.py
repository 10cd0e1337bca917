"""Text in and out of token ids for the OpenAI routes: prompts through the chat template, completions piece by piece.

Prompts are bounded before they are tokenized, in bytes and in time (see `tokenizer_pool`); decoding only reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from transformers import PreTrainedTokenizerBase

from meshrl.core.chat_messages import apply_chat_template, normal_message
from meshrl.inference.http.chat_replies import ChatReplies
from meshrl.inference.http.tokenizer_pool import TokenizerPool
from meshrl.wire.errors import MeshError, Reason

MAX_PROMPT_BYTES = 2**20
WORKERS = 2
ENCODE_LIMIT_S = 10.0

_INCOMPLETE = "\ufffd"  # what a byte-level tokenizer decodes half a character to

_FOREIGN_ARGUMENTS = frozenset({"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters})
_TEMPLATE_ARGUMENTS = frozenset({"documents", "chat_template"})  # of those, what a request may bring


class TextCodec:
    """The tokenizer behind the OpenAI routes, and the parser of `replies`, where there is one for the model.

    A chat template is a program. One that comes with a request is run only with `trust_request_chat_template`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_prompt_bytes: int = MAX_PROMPT_BYTES, workers: int = WORKERS,
        encode_limit_s: float = ENCODE_LIMIT_S, trust_request_chat_template: bool = False,
        replies: ChatReplies | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.replies = replies
        self._max_prompt_bytes = max_prompt_bytes
        self._trust_request_chat_template = trust_request_chat_template
        self._pool = TokenizerPool(tokenizer, workers=workers, limit_s=encode_limit_s)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a prompt. Raises: MeshError INVALID_REQUEST when it is too long, in bytes or to tokenize."""
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
        """Token ids of a conversation with the tools it may use; `arguments` go to the chat template under their names.

        Raises: MeshError INVALID_REQUEST for a message that no text model reads, when the template fails on them, when
        there is none, or for what is too long.
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

    def token_text(self, token_id: int) -> str:
        return self.decode((token_id,), skip_special_tokens=False)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _text_bytes(value: object) -> int:
    """Bytes of all texts in a JSON value, keys included."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, Mapping):
        return sum(_text_bytes(key) + _text_bytes(item) for key, item in value.items())
    return sum(map(_text_bytes, value)) if isinstance(value, list) else 0


class TextStream:
    """Turns tokens that arrive over time into text, and ends it before a stop string.

    Text that may still change stays back: half a character, or the beginning of a stop string.
    """

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._stops = tuple(stops)
        self._token_ids: list[int] = []
        self._context = 0  # first token that the newest text is decoded with
        self._decoded = 0  # tokens whose text has been taken
        self._held = ""

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """The text that these tokens add for good; with `last` also what was held back."""
        if self.stopped:
            return ""
        self._token_ids += token_ids
        self._held += self._new_text(last)
        for stop in self._stops:
            at = self._held.find(stop)
            if at >= 0:
                self.stopped = True
                self._held = self._held[:at]
        if last or self.stopped:
            ready, self._held = self._held, ""
            return ready
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def _new_text(self, last: bool) -> str:
        before = self._decode(self._token_ids[self._context : self._decoded])
        now = self._decode(self._token_ids[self._context :])
        if len(now) <= len(before) or (now.endswith(_INCOMPLETE) and not last):
            return ""
        self._context, self._decoded = self._decoded, len(self._token_ids)
        return now[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
