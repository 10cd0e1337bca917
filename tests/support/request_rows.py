"""Every key of a request with values that must be accepted, and values that must be refused with the key's name.

Made of the keys of the `openai` package, of the routes' schemas and of `request_keys`, as is docs/requests.md.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from openai.types import completion_create_params as plain_params
from openai.types.chat import completion_create_params as chat_params

from meshrl.inference.http.request_keys import OTHER_KEYS, OtherKey
from meshrl.inference.http.schemas import ChatBody, CompletionBody
from meshrl.inference.http.token_route import TokenSampling

CHAT, PLAIN, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
BODIES: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    PLAIN: {"prompt": "a", "max_tokens": 1},
}
SCHEMAS = {CHAT: ChatBody, PLAIN: CompletionBody, TOKENS: TokenSampling}
OPENAI = {
    CHAT: set(typing.get_type_hints(chat_params.CompletionCreateParamsNonStreaming)),
    PLAIN: set(typing.get_type_hints(plain_params.CompletionCreateParamsNonStreaming)),
}

LIMITED: dict[str, tuple[list[Any], list[Any]]] = {
    "tool_choice": (["auto", "none"], ["required", {"type": "function", "function": {"name": "f"}}]),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}]),
    "structured_outputs": ([None], [{"regex": "a"}, {"json": {}}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["auto", "none"], [{"name": "f"}]),
    "echo": ([False], [True]),
    "suffix": ([None], ["a"]),
    "add_special_tokens": ([False], [True]),
    "prompt_logprobs": ([None], [1]),
}
"""Keys that are read of which some values are refused: accepted and refused ones."""

HONOURED: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}], "prompt": [[1, 2], [3]], "model": "any",
    "n": 2, "temperature": 0.5, "top_p": 0.5, "max_tokens": 2, "max_completion_tokens": 2, "seed": 1, "stop": ["b"],
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {"3": 5}, "logprobs": 1, "top_logprobs": 1,
    "stream": False, "stream_options": {"include_usage": True, "include_obfuscation": False}, "tools": [],
    "parallel_tool_calls": True, "reasoning_effort": "low",
}  # fmt: skip
"""A value of each key of OpenAI's that is honoured whatever it is."""

BESIDE: dict[str, Any] = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}
SOME: dict[str, Any] = {"modalities": ["text", "audio"], "best_of": 3, "typical_p": 0.5, "bad_words": ["b"]}


def limited(path: str, key: str) -> bool:
    return (
        key in LIMITED and not (path == PLAIN and key == "add_special_tokens") and not (path == TOKENS and "log" in key)
    )


def accepted_and_refused(key: str, entry: OtherKey) -> tuple[list[Any], list[Any]]:
    some = SOME.get(key, "odd")
    if entry.neutral is None:
        return [None, some], []
    return [None, *entry.neutral], [some]


def request(path: str, key: str, value: Any) -> dict[str, Any]:
    """A small request in which a key has a value, with the keys that it needs beside it."""
    fields = {key: value, **BESIDE.get(key, {})}
    if path == TOKENS:
        return {"token_ids": [1], "sampling_params": {"max_tokens": 1, **fields}}
    body = {**BODIES[path], **fields}
    if key == "max_completion_tokens":
        del body["max_tokens"]
    if key == "logprobs" and path == CHAT:
        body["logprobs"] = True
    return body


def openai_rows(path: str) -> Iterator[tuple[str, Any, int]]:
    """Each key of the `openai` package's requests with a value, and the status that answers it."""
    for key in sorted(OPENAI[path]):
        if limited(path, key):
            good, bad = LIMITED[key]
        elif key in SCHEMAS[path].model_fields:
            good, bad = [HONOURED[key]], []
        else:
            good, bad = accepted_and_refused(key, OTHER_KEYS[key])
        yield from ((key, value, 200) for value in good)
        yield from ((key, value, 400) for value in bad)


def other_rows(path: str) -> Iterator[tuple[str, Any, int]]:
    """The same of the keys that no route reads."""
    for key, entry in OTHER_KEYS.items():
        if key not in SCHEMAS[path].model_fields:
            good, bad = accepted_and_refused(key, entry)
            yield from ((key, value, 200) for value in good)
            yield from ((key, value, 400) for value in bad)
