"""Turns chat messages into the policy's tokens and back, with the renderer that fits its tokenizer.

Only here is a tokenizer loaded, and with it transformers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from loguru import logger
from renderers.base import MODEL_RENDERER_MAP, ParsedResponse, RenderedTokens, Renderer, load_tokenizer
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import Message

from meshrl.core.chat_messages import normal_message
from meshrl.core.config import ConfigError
from meshrl.core.token_cache import TokenCache
from meshrl.models.renderers import RendererError, make_renderer
from meshrl.rollout.rendering.content import tell_content
from meshrl.rollout.rendering.render_cache import KEPT_S, PROMPT_TOKENS, key_of, quicken, remember_prefixes
from meshrl.rollout.rendering.tokenizer_folders import known_class, load_known
from meshrl.wire.errors import MeshError, Reason

INLINE_CHARACTERS = 16_384
"""Longer prompts are tokenized in a thread; for others the hop would cost more."""

WireMessage = Mapping[str, object]
"""A message or a tool in the OpenAI API."""


class UnrenderableError(ValueError):
    """A prompt that no text renderer takes, such as one with images."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RenderedPrompt:
    """`attribution` gives each token's message. `bridged`: it extends the tokens of the turn before, sampled ones
    included."""

    token_ids: list[int]
    attribution: RenderedTokens
    bridged: bool


class PolicyRenderer:
    """Tokenizers are not thread-safe, so it renders one prompt at a time."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._lock = asyncio.Lock()
        self._first_prompts = TokenCache[str, RenderedTokens](PROMPT_TOKENS, kept_s=KEPT_S)
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self.supports_tools: bool = getattr(renderer, "supports_tools", True)

    async def prompt(self, turn: PendingTurn, tools: list[WireMessage] | None) -> RenderedPrompt:
        """Raises UnrenderableError."""
        wire = _wire(turn.prompt)
        wire_tail = wire[turn.tail_start :]
        previous = turn.previous_renderer_token_ids() if _can_be_appended(wire_tail) else None

        # The rollouts of a group begin with the same prompt.
        key = None if turn.prefix_node_ids else key_of(wire, tools)

        def render() -> RenderedPrompt:
            if previous is not None:
                bridged = self._renderer.bridge_to_next_turn(*previous, wire_tail, tools=tools)
                if bridged is not None:
                    return RenderedPrompt(token_ids=bridged.token_ids, attribution=bridged, bridged=True)
            rendered = self._first_prompts.get(key)
            if rendered is None:
                rendered = self._renderer.render(wire, tools=tools, add_generation_prompt=True)
                self._first_prompts.put(key, rendered, len(rendered.token_ids))
            return RenderedPrompt(token_ids=rendered.token_ids, attribution=rendered, bridged=False)

        if self._first_prompts.get(key) is not None:
            return render()
        characters = sum(len(str(message["content"])) for message in wire)
        async with self._lock:
            return render() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(render)

    async def reply(self, messages: Sequence[Message], tools: list[WireMessage] | None) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of the reply to it, the last of `messages`, up to its stop token. Raises
        UnrenderableError, and MeshError INVALID_REQUEST if the template does not render the reply right behind the
        prompt."""
        wire = _wire(messages)

        def render() -> tuple[list[int], list[int]]:
            prompt = self._renderer.render(wire[:-1], tools=tools, add_generation_prompt=True).token_ids
            whole = self._renderer.render(wire, tools=tools).token_ids
            if whole[: len(prompt)] != prompt:
                raise MeshError(
                    Reason.INVALID_REQUEST,
                    "the chat template renders a reply otherwise than behind its prompt, so nobody can learn it; set"
                    " rollout.renderer to one that does not, or give the tokenizer another chat template",
                )
            reply = whole[len(prompt) :]
            stops = [place for place, token in enumerate(reply) if token in self.stop_token_ids]
            return prompt, reply[: stops[0] + 1] if stops else reply

        async with self._lock:
            return await asyncio.to_thread(render)

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: list[WireMessage] | None
    ) -> ParsedResponse:
        return self._renderer.parse_response(token_ids, prompt_ids=prompt_ids, tools=tools)


def _wire(messages: Sequence[Message]) -> list[WireMessage]:
    wire: list[WireMessage] = []
    for place, message in enumerate(messages):
        raw = message_to_wire(message)
        try:
            content = normal_message(raw)["content"]
        except ValueError as error:
            raise UnrenderableError(f"prompt[{place}]: {error}") from error
        wire.append({**raw, "content": content})
    return wire


def _can_be_appended(tail: Sequence[WireMessage]) -> bool:
    """Whether a renderer can append it: tool results, then at most one user message."""
    roles = [message["role"] for message in tail]
    return bool(roles) and all(role == "tool" for role in roles[:-1]) and roles[-1] in ("tool", "user")


def load_renderer(tokenizer: str, options: Mapping[str, object], *, show_rows: int = 0) -> Renderer:
    """The renderer for a tokenizer (name or folder); blocks. The first `show_rows` prompts are logged. Without options
    it is the one made for the model, else the tokenizer's own chat template. Raises ConfigError when the tokenizer
    cannot be loaded or the options name no renderer."""
    try:
        known = load_known(tokenizer)
        loaded = load_tokenizer(tokenizer) if known is None else known
    except (OSError, ValueError) as error:
        raise ConfigError(f"rollout.tokenizer: cannot load {tokenizer!r}: {error}") from error
    quicken(loaded)
    renderer = _create(loaded, tokenizer, options)
    remember_prefixes(renderer)
    tell_content(renderer, loaded)
    show_prompts(renderer, loaded, show_rows)
    return renderer


def _create(loaded: object, tokenizer: str, options: Mapping[str, object]) -> Renderer:
    # Of a model of text alone there is nothing left to find out, for which the search would import torch.
    text_alone = tokenizer not in MODEL_RENDERER_MAP and known_class(tokenizer) is not None
    make, default = partial(make_renderer, loaded, key="rollout.renderer", name=tokenizer), {"name": "default"}
    try:
        return make(options or (default if text_alone else {}))
    except RendererError as error:
        if options:
            raise ConfigError(str(error)) from error
        if not getattr(loaded, "chat_template", None):
            raise ConfigError(
                f"no renderer knows {tokenizer!r} and its tokenizer has no chat template; set rollout.renderer"
            ) from error
        logger.info("no renderer is made for {}; its chat template renders", tokenizer)
        return make(default)


def show_prompts(renderer: Renderer, tokenizer: Any, count: int) -> None:
    """Logs the renderer's first `count` prompts."""
    render, left = renderer.render, count

    @functools.wraps(render)
    def shown(messages: Any, **options: Any) -> RenderedTokens:
        nonlocal left
        rendered = render(messages, **options)
        if left and options.get("add_generation_prompt"):
            left -= 1
            logger.info("{}", described(rendered, messages, tokenizer, type(renderer).__name__))
        return rendered

    renderer.render = shown


def described(rendered: RenderedTokens, messages: Sequence[Mapping[str, object]], tokenizer: Any, renderer: str) -> str:
    lines = [f"a prompt of {len(rendered.token_ids)} tokens by {renderer}:"]
    places = np.array(rendered.message_indices, dtype=np.int64)
    for start, end in pairwise([0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]):
        place = int(places[start])
        whose = "markup" if place < 0 else f"message {place} ({messages[place]['role']})"
        token_ids = rendered.token_ids[start:end]
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        lines.append(f"  {whose}, tokens {start} to {end - 1}: {text!r:.2000} {token_ids!s:.2000}")
    return "\n".join(lines)
