"""Keeps the tokens of prompts that are rendered repeatedly: the first prompt of a group's rollouts, earlier turns."""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from renderers.base import Renderer
from renderers.default import DefaultRenderer

from meshrl.core.token_cache import TokenCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


KEPT_S = 300.0
"""No longer, since a template may write the date."""
PROMPT_TOKENS = 256_000
PREFIX_TOKENS = 1_000_000
SHORT_TEXT = 64


def key_of(*parts: object) -> str | None:
    """Of a rendered input; None for messages that JSON does not distinguish."""
    try:
        return json.dumps(parts)
    except (TypeError, ValueError):
        return None


def remember_prefixes(renderer: Renderer) -> None:
    """The renderer for unknown chat templates renders each prefix of a conversation anew at each turn."""
    if type(renderer) is not DefaultRenderer or not hasattr(renderer, "_apply"):
        return
    apply = renderer._apply
    cache: TokenCache[str, array[int]] = TokenCache(PREFIX_TOKENS, kept_s=KEPT_S)

    def kept(messages: object, *, tools: object = None, add_generation_prompt: bool = False) -> list[int]:
        key = key_of(messages, tools, add_generation_prompt)
        if (found := cache.get(key)) is not None:
            return found.tolist()
        token_ids: list[int] = apply(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        cache.put(key, array("q", token_ids), len(token_ids))
        return token_ids

    renderer._apply = kept


def quicken(tokenizer: PreTrainedTokenizerBase) -> None:
    """Has a tokenizer decode a list of ids without looking at each first, and keep the ids of short texts: renderers
    ask for the same ones up to six times."""
    decode, encode = tokenizer.decode, tokenizer.encode
    one_by_one = getattr(tokenizer, "_decode", None)

    def quick_decode(token_ids: object, skip_special_tokens: bool = False, **options: object) -> object:
        plain = type(token_ids) is list and token_ids and type(token_ids[0]) is int and not options
        if one_by_one is None or not plain:
            return decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return one_by_one(token_ids=token_ids, skip_special_tokens=skip_special_tokens)

    @functools.lru_cache(256)
    def short(text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(encode(text, add_special_tokens=add_special_tokens))

    def quick_encode(text: object, *args: object, add_special_tokens: bool = True, **options: object) -> Sequence[int]:
        if type(text) is str and len(text) <= SHORT_TEXT and not args and not options:
            return list(short(text, add_special_tokens))
        return encode(text, *args, add_special_tokens=add_special_tokens, **options)  # type: ignore[no-any-return]  # transformers says Any

    convert = tokenizer.convert_tokens_to_ids

    @functools.lru_cache(256)
    def id_of(token: str) -> object:
        return convert(token)

    def quick_convert(tokens: object) -> object:
        return id_of(tokens) if type(tokens) is str else convert(tokens)

    tokenizer.decode, tokenizer.encode, tokenizer.convert_tokens_to_ids = quick_decode, quick_encode, quick_convert
    vars(tokenizer)["unk_token_id"] = tokenizer.unk_token_id  # else it is looked for each time
