"""Every request key of OpenAI's and vLLM's APIs is honoured, neutral or refused, as docs/requests.md lists it."""

from __future__ import annotations

import ast
import json
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as plain_params
from openai.types.chat import completion_create_params as chat_params

from inference_kit import EngineFactory, Start, post
from meshrl.inference.http.request_keys import CHAT_KEYS, OTHER_KEYS, OtherKey
from meshrl.inference.http.runs import Serving
from meshrl.inference.http.schemas import ChatBody, CompletionBody
from meshrl.inference.http.token_route import TokenSampling

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "requests.md"
VLLM = ROOT / ".tools" / "vllm" / "lib" / "python3.11" / "site-packages" / "vllm"
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


# --- the routes ------------------------------------------------------------------------------------


async def status(client: Any, path: str, key: str, value: Any) -> tuple[int, str]:
    async with client.post(path, json=request(path, key, value)) as response:
        text = await response.text()
        return response.status, "" if response.status == 200 else json.loads(text)["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_every_key_of_the_openai_package_is_in_the_table(path: str) -> None:
    assert not OPENAI[path] - SCHEMAS[path].model_fields.keys() - OTHER_KEYS.keys()


@pytest.mark.parametrize("path", [CHAT, PLAIN, TOKENS])
async def test_every_key_is_answered_as_the_table_has_it(serve: Start, path: str) -> None:
    client = await serve()
    for key, value, expected in [] if path == TOKENS else openai_rows(path):
        code, message = await status(client, path, key, value)
        assert (code, expected == 200 or key in message) == (expected, True), (key, value, message)
    rows = list(other_rows(path))
    assert len(rows) > 80
    for key, value, expected in rows:
        code, message = await status(client, path, key, value)
        assert code == expected, (key, value, message)
        if code == 400:  # with what to do instead
            assert message.startswith(("sampling_params: " if path == TOKENS else "body: ") + key)
            assert ";" in message


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_null_is_the_default_of_every_key(serve: Start, path: str) -> None:
    client = await serve()
    for key in sorted(OPENAI[path] - {"messages", "prompt"}):
        assert (await status(client, path, key, None))[0] == 200, key


async def test_on_the_token_route_unknown_and_misplaced_keys_are_refused(serve: Start) -> None:
    client = await serve()
    sampling = {"max_tokens": 1, "temprature": 0.5}
    code, answer = await post(client, TOKENS, {"token_ids": [1], "sampling_params": sampling})
    assert (code, answer["error"]["message"]) == (
        400, "sampling_params: temprature: no such key; did you mean temperature?",
    )  # fmt: skip
    for key, value in {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}.items():
        code, answer = await post(client, TOKENS, {"token_ids": [1], "sampling_params": {key: value}})
        assert (code, key in answer["error"]["message"]) == (400, True)
    extra = {"packed_logprobs": True, "pack_logprobs": True}
    code, answer = await post(client, TOKENS, {"token_ids": [1], "sampling_params": {"extra_args": extra}})
    assert (code, answer["error"]["message"]) == (
        400, "sampling_params: extra_args.pack_logprobs: no such key; did you mean packed_logprobs?",
    )  # fmt: skip
    code, answer = await post(client, TOKENS, {"token_ids": [1], "temperature": 0.0})
    assert (code, "temperature: belongs into sampling_params" in answer["error"]["message"]) == (400, True)
    assert (await post(client, TOKENS, {"token_ids": [1], "cache_salt": "s", "priority": 1}))[0] == 200


async def test_what_a_caller_that_renders_passes_through_is_taken_on_the_token_route(serve: Start) -> None:
    client = await serve()
    for key, entry in CHAT_KEYS.items():
        good, bad = accepted_and_refused(key, entry)
        assert [(await status(client, TOKENS, key, value))[0] for value in good] == [200] * len(good), key
        assert [(await status(client, TOKENS, key, value))[0] for value in bad] == [400] * len(bad), key


async def test_unknown_keys_of_the_text_routes_are_logged_once_each(serve: Start, warned: list[str]) -> None:
    client = await serve()
    for _ in range(3):
        for path in (CHAT, PLAIN):
            assert (await post(client, path, {**BODIES[path], "temprature": 1, "user": "me"}))[0] == 200
    assert [line for line in warned if "the key" in line] == [
        f"{CHAT}: the key 'temprature' is not known and changes nothing; this is logged once"
    ]


async def test_unknown_keys_are_logged_up_to_a_bound(start_engine: EngineFactory, warned: list[str]) -> None:
    serving = Serving(await start_engine(), model_name="tiny", request_deadline_s=10.0)
    for number in range(2000):
        serving.note_unknown("/v1/completions", [f"key {number}", "key 0", "user"])
    assert (len(warned), len(set(warned)), "'key 0'" in warned[0]) == (1000, 1000, True)


def fields_in(path: Path, *classes: str) -> set[str]:
    """Names of the annotated fields of these classes, without importing them."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    members = [member for node in found if node.name in classes for member in node.body]
    names = {
        member.target.id
        for member in members
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
    }
    return {name for name in names if not name.startswith("_")} - {"model_config", "output_text_buffer_length"}


@pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM in .tools (make vllm)")
def test_every_request_key_of_vllm_is_known() -> None:
    routes = VLLM / "entrypoints" / "openai"
    found = {
        CHAT: fields_in(routes / "chat_completion" / "protocol.py", "ChatCompletionRequest"),
        PLAIN: fields_in(routes / "completion" / "protocol.py", "CompletionRequest"),
        TOKENS: fields_in(VLLM / "sampling_params.py", "SamplingParams"),
    }
    assert all(len(keys) > 20 for keys in found.values())
    for path, keys in found.items():
        assert sorted(keys - SCHEMAS[path].model_fields.keys() - OTHER_KEYS.keys()) == [], path


# --- the page -------------------------------------------------------------------------------------


def use(path: str, key: str) -> str:
    """What becomes of a key on a route, in the words of the page."""
    if limited(path, key) and key in SCHEMAS[path].model_fields:
        return "400, except " + ", ".join(f"`{json.dumps(value)}`" for value in LIMITED[key][0])
    if key == "model":  # an engine serves one model, whatever a client calls it
        return "neutral"
    if key in SCHEMAS[path].model_fields:
        return "honoured"
    entry = OTHER_KEYS.get(key) or (CHAT_KEYS.get(key) if path == TOKENS else None)
    if entry is None:
        return "400, no such key" if path == TOKENS else "not known, logged"
    if entry.neutral is None:
        return "neutral"
    return "400" + (
        ", except " + ", ".join(f"`{json.dumps(value)}`" for value in entry.neutral) if entry.neutral else ""
    )


def page() -> str:
    """A row of the table for each key whose treatment depends on the route; the others in a list for each treatment."""
    keys = sorted(set().union(*(schema.model_fields for schema in SCHEMAS.values()), OTHER_KEYS, CHAT_KEYS))
    alike: dict[str, list[str]] = {"honoured": [], "neutral": [], "400": [], "400, except": []}
    rows = []
    for key in keys:
        uses = [use(path, key) for path in SCHEMAS]
        if len(set(uses)) > 1:
            rows.append(f"| `{key}` | {' | '.join(uses)} |")
            continue
        treatment, _, values = uses[0].partition("except ")
        alike[f"{treatment}except" if values else treatment].append(f"`{key}` ({values})" if values else f"`{key}`")
    lists = [f"- **{treatment}**: {', '.join(found)}." for treatment, found in alike.items()]
    intro, heading, _ = PAGE.read_text().partition("## The same on every route\n")
    table = ["| key | chat | completions | `sampling_params` |", "|---|---|---|---|", *rows]
    return intro + heading + "\n".join(["", *lists, "", "## Different by route", "", *table, ""])


def test_the_page_is_made_of_the_table() -> None:
    if os.environ.get("MESHRL_WRITE_GOLDEN"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()
