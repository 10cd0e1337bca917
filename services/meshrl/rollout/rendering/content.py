"""Finds the content of messages among the tokens that an unknown chat template made of them; the rest is markup."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from renderers.base import RenderedTokens, Renderer
from renderers.default import DefaultRenderer

CUT_CHARACTER = "\ufffd"
"""Decoded from a character of which a token is missing."""

FIRST_WINDOW = 16
"""Tokens at an end of a message in which the end of its content is looked for first."""


def tell_content(renderer: Renderer, tokenizer: Any) -> None:
    if type(renderer) is not DefaultRenderer:
        return
    render = renderer.render

    @functools.wraps(render)
    def told(messages: Any, **options: Any) -> RenderedTokens:
        rendered = render(messages, **options)
        rendered.is_content = content_mask(
            rendered, messages, decode=tokenizer.decode, stop_token_ids=renderer.get_stop_token_ids()
        )
        return rendered

    renderer.render = told


def content_mask(
    rendered: RenderedTokens,
    messages: Sequence[Mapping[str, object]],
    *,
    decode: Callable[[list[int]], str],
    stop_token_ids: Sequence[int],
) -> list[bool]:
    """(T,) true for tokens of content. Of an assistant's message that is all up to its stop token, of others the tokens
    that write its text, or the whole message if that text is not found exactly once."""
    mask = [False] * len(rendered.token_ids)
    lengths = Counter(rendered.message_indices)
    start = 0
    for place, message in enumerate(messages):
        end = start + lengths[place]
        token_ids, text = rendered.token_ids[start:end], message.get("content")
        found: tuple[int, int] | None = None
        if message.get("role") == "assistant":
            stops = [at for at, token in enumerate(token_ids) if token in stop_token_ids]
            found = (0, stops[-1] + 1) if stops else None
        elif isinstance(text, str):
            found = content_range(token_ids, text, decode)
        first, last = (0, len(token_ids)) if found is None else found
        mask[start + first : start + last] = [True] * (last - first)
        start = end
    return mask


def content_range(token_ids: list[int], text: str, decode: Callable[[list[int]], str]) -> tuple[int, int] | None:
    """The tokens [start, end) of a message that write its text; None if it is not found exactly once. A token that also
    writes markup belongs with its first character."""
    whole = decode(token_ids)
    sought = text if text in whole else text.strip()  # many templates strip it
    if not sought:
        return 0, 0
    if whole.count(sought) != 1:
        return None
    first = whole.index(sought)
    return (
        tokens_that_write(token_ids, first, whole, decode),
        tokens_that_write(token_ids, first + len(sought), whole, decode),
    )


def tokens_that_write(token_ids: list[int], count: int, whole: str, decode: Callable[[list[int]], str]) -> int:
    """The least number of first tokens that write `count` characters of `whole`. The search begins at the nearer end
    and decodes little of a long message. Not every tokenizer's texts of parts are parts of the text, so the answer is
    checked on whole prefixes."""

    def characters(num_tokens: int) -> int:
        return len(decode(token_ids[:num_tokens]).rstrip(CUT_CHARACTER))

    if count <= 0:
        return 0
    guess = _guess(token_ids, count, whole, decode)
    if characters(guess) >= count and characters(guess - 1) < count:
        return guess
    return bisect_left(range(len(token_ids) + 1), count, key=characters)


def _guess(token_ids: list[int], count: int, whole: str, decode: Callable[[list[int]], str]) -> int:
    """Right if decoded parts joined make the whole."""
    start, written, low, high, window = 0, 0, 0, len(token_ids), FIRST_WINDOW
    if 2 * count < len(whole):
        while window < len(token_ids) and len(decode(token_ids[:window])) < count:
            low, window = window, 4 * window
        high = min(window, high)
    else:
        while window < len(token_ids):
            tail = decode(token_ids[-window:])
            if not tail.startswith(CUT_CHARACTER) and len(whole) - len(tail) < count:
                start = low = len(token_ids) - window
                written = len(whole) - len(tail)
                break
            window *= 4
    while high - low > 1:  # the first `low` tokens write less than `count`, the first `start` write `written`
        middle = (low + high) // 2
        part = decode(token_ids[start:middle])
        if written + len(part.rstrip(CUT_CHARACTER)) >= count:
            high = middle
            continue
        low = middle
        if not part.endswith(CUT_CHARACTER):
            start, written = middle, written + len(part)
    return high
