"""Text in and out of token ids for the OpenAI routes: prompts through the chat template, completions piece by piece.

Encoding changes a fast tokenizer's state, so it runs on one thread of its own; decoding only reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from meshrl.wire.errors import MeshError, Reason

_INCOMPLETE = "\ufffd"  # what a byte-level tokenizer decodes half a character to


class TextCodec:
    """The tokenizer behind the OpenAI routes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        def work() -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None, **kwargs: Any
    ) -> tuple[int, ...]:
        """Raises: MeshError INVALID_REQUEST when the chat template refuses the messages or there is none."""

        def work() -> tuple[int, ...]:
            ids = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=True, return_dict=False, **kwargs
            )
            return tuple(ids)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (TemplateError, ValueError, TypeError, KeyError) as error:  # what templates raise on odd messages
            raise MeshError(
                Reason.INVALID_REQUEST, f"the chat template cannot render these messages: {error}"
            ) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        return self.decode((token_id,), skip_special_tokens=False)


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
        """The text that these tokens settle; with `last` also what was held back."""
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
            settled, self._held = self._held, ""
            return settled
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        settled, self._held = self._held[:cut], self._held[cut:]
        return settled

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
