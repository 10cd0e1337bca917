"""Which tokens of a message are content, where an unknown chat template wrote it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import DefaultRendererConfig, Qwen3RendererConfig, create_renderer
from renderers.base import RenderedTokens

from chatml_tokenizer import chatml_tokenizer
from meshrl.rollout.rendering.content import CUT_CHARACTER, content_range, tokens_that_write
from meshrl.rollout.rendering.renderer import load_renderer
from meshrl.sft.data.rendering import TEMPLATES

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "Say Grüße."},
    {"role": "user", "content": "1 + 2?\nnow"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "ä3."},
    {"role": "tool", "tool_call_id": "c", "content": "4"},
]


def told(folder: Path, template: str, chat: list[dict[str, object]]) -> list[str]:
    """The content of each message, by the renderer for unknown templates."""
    tokenizer = chatml_tokenizer(template)
    tokenizer.save_pretrained(folder)
    rendered = load_renderer(str(folder), {"name": "default"}).render(chat, tools=TOOLS, add_generation_prompt=True)
    return contents(tokenizer, rendered, len(chat))


def contents(tokenizer: Any, rendered: RenderedTokens, num_messages: int) -> list[str]:
    rows = list(zip(rendered.token_ids, rendered.message_indices, rendered.is_content, strict=True))
    return [
        tokenizer.decode([token for token, owner, content in rows if content and owner == place])
        for place in range(num_messages)
    ]


def test_a_template_has_the_content_that_the_renderer_made_for_its_model_tells(tmp_path: Path) -> None:
    template = (TEMPLATES / "qwen3.jinja").read_text()
    tokenizer = chatml_tokenizer(template)
    theirs = contents(tokenizer, create_renderer(tokenizer, Qwen3RendererConfig()).render(CHAT, tools=TOOLS), len(CHAT))
    ours = told(tmp_path, template, CHAT)
    assert ours[3:] == theirs[3:] == ["ä3.", "4"]
    assert ours[:2] == theirs[:2] == ["Say Grüße.", "1 + 2?\nnow"]
    assert ours[2].endswith("</tool_call><|im_end|>")  # and not with the newline behind it
    assert theirs[2].endswith("</tool_call><|im_end|>")


def test_a_template_may_strip_what_was_said(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim + ';' }}{% endfor %}"
    assert told(tmp_path, template, [{"role": "tool", "content": " 12\n"}]) == ["12"]


def test_a_message_that_is_not_found_once_is_content_as_a_whole(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content | upper + ';' }}{% endfor %}"
    chat = [{"role": "tool", "content": "yes"}, {"role": "user", "content": "NO"}]
    assert told(tmp_path, template, chat) == ["[tool]YES;", "NO"]
    plain = template.replace(" | upper", "")
    assert told(tmp_path, plain, [{"role": "user", "content": "se"}]) == ["[user]se;"]  # where in "[user]se;"?


def test_who_says_nothing_has_no_content_and_what_opens_a_reply_is_none(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = [{"role": "user", "content": "ab"}, {"role": "tool", "content": ""}]
    assert told(tmp_path, template, chat) == ["ab", ""]
    rendered = load_renderer(str(tmp_path), {"name": "default"}).render(chat, add_generation_prompt=True)
    assert rendered.is_content[-len("[assistant]") :] == [False] * len("[assistant]")


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (["[", "to", "ol", "]", "5", ".\n", "[", "end"], (4, 6)),  # the last token of the content ends in markup
        (["[to", "ol]\n5", ".", "[end"], (2, 3)),  # and its first begins in it
        (["[tool]", "5.", "5.", "[end"], None),
    ],
)
def test_a_token_belongs_to_what_its_first_character_belongs_to(pieces: list[str], found: object) -> None:
    token_ids = list(range(len(pieces)))
    assert content_range(token_ids, "5.", lambda ids: "".join(pieces[token] for token in ids)) == found


Decode = Callable[[list[int]], str]


def bytes_of(token_ids: list[int]) -> str:
    """As a tokenizer of bytes decodes: a character may be cut."""
    return bytes(token_ids).decode(errors="replace")


def letters_of(token_ids: list[int]) -> str:
    """As sentencepiece decodes: a space opens a word, and the first one of all is left out."""
    return "".join(" " + chr(97 + token % 26) if token % 3 else chr(97 + token % 26) for token in token_ids).lstrip(" ")


def words_of(token_ids: list[int]) -> str:
    """As a decoder that looks at neighbours: no space before a full stop, so that parts are not parts of the whole."""
    return " ".join("." if token % 7 == 0 else "ab" for token in token_ids).replace(" .", ".")


@pytest.mark.parametrize("decode", [bytes_of, letters_of, words_of])
@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aß语😀 .", max_size=120), st.data())
def test_the_search_from_the_nearer_end_finds_what_a_search_of_whole_prefixes_finds(
    decode: Decode, text: str, data: st.DataObject
) -> None:
    token_ids = list(text.encode())
    whole = decode(token_ids)
    count = data.draw(st.integers(0, len(whole)))
    lengths = range(len(token_ids) + 1)
    slow = bisect_left(lengths, count, key=lambda end: len(decode(token_ids[:end]).rstrip(CUT_CHARACTER)))
    assert tokens_that_write(token_ids, count, whole, decode) == slow


def test_a_long_message_is_decoded_a_few_times_only() -> None:
    text = "x" * 15_000
    token_ids = list(f"[user]{text}[end]".encode())
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return bytes_of(ids)

    assert content_range(token_ids, text, decode) == (6, 15_006)
    assert decoded < 4 * len(token_ids)  # the whole, and two prefixes to check the end


def test_renderers_made_for_a_model_are_left_as_they_are(tmp_path: Path) -> None:
    tokenizer = chatml_tokenizer((TEMPLATES / "qwen3.jinja").read_text())
    tokenizer.save_pretrained(tmp_path)
    ours = load_renderer(str(tmp_path), {"name": "qwen3"}).render(CHAT, tools=TOOLS)
    assert ours.is_content == create_renderer(tokenizer, Qwen3RendererConfig()).render(CHAT, tools=TOOLS).is_content
    assert create_renderer(tokenizer, DefaultRendererConfig()).render(CHAT[:2]).is_content == []
