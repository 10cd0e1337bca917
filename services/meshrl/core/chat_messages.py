"""Brings the messages of a chat into the one shape that every chat template and renderer reads: templates drop what
they do not know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshrl.wire.values import JsonObject

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Of chat completions and of the responses API."""


_ASKS_FOR_NULL = re.compile(r"content(?:['\"]\])?\s+is\s+(?:not\s+)?none")


def normal_message(message: JsonObject) -> dict[str, Any]:
    """The message with its content as text and the arguments of its tool calls as objects.

    Text parts are joined without a separator; null becomes the empty text. `tool_calls` is left out without calls,
    since templates test for the key. `reasoning` and `reasoning_content` are each given as the other too. Raises
    ValueError for a role or content that no text model reads.
    """
    normal = dict(message)
    role = normal.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"a message needs a role, got {dict(message)!r:.80}")
    if calls := normal.pop("tool_calls", None):
        listed = _parsed(calls)
        normal["tool_calls"] = [_call(call) for call in listed] if isinstance(listed, list | tuple) else listed
    if "content" not in normal and not calls:
        raise ValueError(f"a message of role {role!r} needs content; send an empty string for an empty message")
    normal["content"] = _text(normal.get("content"), role)
    for key, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(normal.get(key), str):
            normal.setdefault(other, normal[key])
    return normal


def apply_chat_template(tokenizer: Any, messages: Sequence[JsonObject], **options: Any) -> Any:
    """Raises as the template.

    Messages that call tools and have no text have null content for templates that ask for it: those of
    DeepSeek-R1-Distill write no calls beside text. Templates that fail on arguments as objects, such as the same, get
    them as JSON text.
    """
    if not any(message.get("tool_calls") for message in messages):
        return tokenizer.apply_chat_template(list(messages), **options)
    template = options.get("chat_template") or tokenizer.chat_template
    forms = [list(messages)]
    if _ASKS_FOR_NULL.search(str(template)):
        forms.insert(0, [_with_null(message) for message in messages])
    forms = [form for each in forms for form in (each, [_with_json(message) for message in each])]
    for form in forms[:-1]:
        try:
            return tokenizer.apply_chat_template(form, **options)
        except Exception:  # noqa: BLE001  # a template is a program, which may raise anything
            continue
    return tokenizer.apply_chat_template(forms[-1], **options)


def _with_null(message: JsonObject) -> JsonObject:
    return {**message, "content": None} if message.get("tool_calls") and message.get("content") == "" else message


def _with_json(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_json(call) for call in calls]}


def _call_with_json(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _text(content: object, role: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"content of a message of role {role!r} must be a string, a list of text parts or null, got"
            f" {type(content).__name__}"
        )
    return "".join(_part(part, role) for part in content)


def _part(part: object, role: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"a part of the content of a message of role {role!r} must be an object, got {part!r:.80}")
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        raise ValueError(
            f"content of a message of role {role!r} has a part of type {kind!r}; this serves text models, so send parts"
            " of type 'text' alone"
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a part of type {kind!r} in a message of role {role!r} needs its text as a string")
    text: str = part["text"]
    return text


def _call(call: object) -> object:
    call = _parsed(call)
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    if function is None and "name" in call:  # the shape of verifiers
        named = {"name": call["name"], "arguments": _arguments(call.get("arguments"))}
        return {**({"id": call["id"]} if "id" in call else {}), "type": "function", "function": named}
    return call


def _arguments(arguments: object) -> object:
    return {} if arguments in (None, "") else _parsed(arguments)


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict | list) else value
