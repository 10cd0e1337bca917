"""Logs the first prompts that a process renders: which renderer made them, and the tokens of each message."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from loguru import logger
from renderers.base import RenderedTokens, Renderer


def show_prompts(renderer: Renderer, tokenizer: Any, count: int) -> None:
    """Has the renderer log its first `count` prompts, as `sft` shows its first rows."""
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
    """A prompt as text: a line for each message and each piece of markup between them, with its tokens."""
    lines = [f"a prompt of {len(rendered.token_ids)} tokens by {renderer}:"]
    places = np.array(rendered.message_indices, dtype=np.int64)
    for start, end in pairwise([0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]):
        place = int(places[start])
        whose = "markup" if place < 0 else f"message {place} ({messages[place]['role']})"
        token_ids = rendered.token_ids[start:end]
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        lines.append(f"  {whose}, tokens {start} to {end - 1}: {text!r:.2000} {token_ids!s:.2000}")
    return "\n".join(lines)
