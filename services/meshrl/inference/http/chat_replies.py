"""Turns the tokens sampled for a chat request into OpenAI's message: its text, its reasoning and its tool calls.

The model family's renderer (package `renderers`) knows the markup; without one an answer is all text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loguru import logger
from pydantic import JsonValue
from transformers import PreTrainedTokenizerBase

from meshrl.models.load import ModelError
from meshrl.models.renderers import RendererError, make_renderer

if TYPE_CHECKING:
    from renderers import Renderer
    from renderers.base import ParsedToolCall

NEEDS_A_PARSER = (
    "tools: this server does not know how its model writes tool calls, so they would stay in the text; start it with "
    "the renderer of the model's family (inference.renderer.name, such as qwen3), or leave tools out"
)


class ChatReplies:
    def __init__(self, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self.supports_tools: bool = getattr(renderer, "supports_tools", True)
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())

    @classmethod
    def load(cls, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]) -> ChatReplies | None:
        """By options, else by the model's name; None for an unknown name. Raises ModelError for options that name no
        renderer, or one that does not fit the tokenizer."""
        try:
            from renderers.base import MODEL_RENDERER_MAP  # takes a second, and is not in every environment
        except ImportError as error:
            if options:
                message = "inference.renderer needs the package renderers here; install meshrl[inference] anew"
                raise ModelError(message) from error
            return None
        if not options and tokenizer.name_or_path not in MODEL_RENDERER_MAP:
            return None
        try:
            renderer = make_renderer(tokenizer, options, key="inference.renderer")
        except RendererError as error:
            if options:
                raise ModelError(str(error)) from error
            logger.warning("{}; replies stay text", error)
            return None
        logger.info("replies of chat requests are parsed by {}", type(renderer).__name__)
        return cls(renderer, tokenizer)

    def reply(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, text: str, stops: Sequence[str] = (),
        tools: Sequence[Mapping[str, JsonValue]] = (), parallel: bool = True,
    ) -> dict[str, object]:  # fmt: skip
        """OpenAI's message for sampled tokens (without their stop token) that read as `text`.

        Calls that do not parse, or without `tools`, stay in the content. Not `parallel` keeps the first call alone.
        """
        parsed = self._renderer.parse_response(list(token_ids), prompt_ids=list(prompt_ids), tools=list(tools) or None)
        if not parsed.tool_calls and not parsed.reasoning_content:
            return {"role": "assistant", "content": text}
        good = [call for call in parsed.tool_calls if tools and call.status == "ok" and call.name]
        left = [self._text_of(call, token_ids) for call in parsed.tool_calls if call not in good]
        content = _before(stops, "\n".join([part for part in (parsed.content, *left) if part]))
        message: dict[str, object] = {"role": "assistant", "content": content or (None if good else "")}
        if parsed.reasoning_content:
            message["reasoning_content"] = _before(stops, parsed.reasoning_content)
        if good:
            message["tool_calls"] = [_call_json(call) for call in (good if parallel else good[:1])]
        return message

    def _text_of(self, call: ParsedToolCall, token_ids: Sequence[int]) -> str:
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        return str(self._tokenizer.decode(list(token_ids[start:end])))


def _call_json(call: ParsedToolCall) -> dict[str, object]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})
    return {
        "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _before(stops: Sequence[str], text: str) -> str:
    return text[: min([found for stop in stops if (found := text.find(stop)) >= 0], default=len(text))]
