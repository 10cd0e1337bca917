"""Makes conversations of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshrl.core.chat_messages import normal_message
from meshrl.wire.values import JsonObject

Row: TypeAlias = JsonObject  # columns by name, as JSON or a dataset has them
Message = Row
Tool = Row


class DataError(Exception):
    """The data cannot be used."""


MARKS = ("weight", "loss_mask", "trainable", "train")
"""Keys of a message that mark it as learned or not: OpenAI's and Mistral's, Fireworks', axolotl's."""

_KEYS = frozenset({"role", "content", "reasoning", "tool_calls", "tool_call_id", "id", "name", *MARKS})


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row.

    `marks` has the places of messages that are marked as learned or not. Of the others those before `learn_from` are
    context whatever their role. Nothing here reads `other_columns` and `other_keys`; a chat template may.
    """

    row: str
    messages: tuple[Message, ...]
    learn_from: int = 0
    marks: Mapping[int, bool] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    template_options: Mapping[str, object] = field(default_factory=dict)
    other_columns: frozenset[str] = frozenset()
    other_keys: frozenset[str] = frozenset()

    def learned(self, roles: frozenset[str]) -> list[bool]:
        """Of each message, by its mark or else its role."""
        return [
            self.marks.get(place, place >= self.learn_from and message["role"] in roles)
            for place, message in enumerate(self.messages)
        ]


def to_conversation(row: Row, name: str) -> Conversation:
    """messages take precedence over prompt and completion. `name` is the row's in errors. Raises DataError."""
    if row.get("messages") is not None:
        taken = {"messages"}
        messages, learn_from = _messages(_parsed(row, "messages", name), name, "messages", role="user"), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        taken = {"prompt", "completion"}
        prompt = _messages(row["prompt"], name, "prompt", role="user")
        messages = (*prompt, *_messages(row["completion"], name, "completion", role="assistant"))
        learn_from = len(prompt)
    else:
        raise DataError(f"{name} has columns {sorted(row)}; expected messages, or prompt and completion")
    options = _parsed(row, "chat_template_kwargs", name) or {}
    if not isinstance(options, Mapping):
        raise DataError(f"{name}: chat_template_kwargs must be an object, got {type(options).__name__}")
    marks = {place: mark for place, message in enumerate(messages) if (mark := _mark(message, name, place)) is not None}
    return Conversation(
        row=name,
        messages=tuple({key: value for key, value in message.items() if key not in MARKS} for message in messages),
        learn_from=learn_from,
        marks=marks,
        tools=_tools(row, name),
        template_options=options,
        other_columns=frozenset(row) - taken - {"tools", "tool_defs", "chat_template_kwargs"},
        other_keys=frozenset(key for message in messages for key in message) - _KEYS,
    )


def _mark(message: Message, name: str, place: int) -> bool | None:
    found = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, value in found.items():
        if value not in (0, 1):  # true and false among them
            raise DataError(
                f"{name}, message {place}: {key} must be 0 or 1 (or false or true), got {value!r}; a message is learned"
                " whole or not at all"
            )
    if len(set(map(bool, found.values()))) > 1:
        raise DataError(f"{name}, message {place}: {' and '.join(found)} contradict each other; keep one")
    return bool(next(iter(found.values()))) if found else None


def _messages(value: object, name: str, column: str, *, role: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    if not isinstance(value, Sequence) or not value:
        got = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{name}: {column} must be a list of messages or a string, got {got}")
    messages = []
    for place, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise DataError(f"{name}: each message of {column} needs a role and content, got {message!r:.80}")
        try:
            messages.append(normal_message(message))
        except ValueError as error:
            raise DataError(f"{name}, message {place} of {column}: {error}") from error
    return tuple(messages)


def _tools(row: Row, name: str) -> tuple[Tool, ...]:
    """Tool definitions in OpenAI's shape, also from those of verifiers (tool_defs)."""
    column = "tools" if row.get("tools") is not None else "tool_defs"
    value = _parsed(row, column, name)
    if not value:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{name}: {column} must be a list, got {type(value).__name__}")
    tools = [_parsed({column: tool}, column, name) for tool in value]
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise DataError(f"{name}: each of {column} must be an object with a name, got {tool!r:.80}")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _parsed(row: Row, column: str, name: str) -> Any:
    """JSON text is parsed; any other text in messages is one message."""
    value = row.get(column)
    if not isinstance(value, str) or (column == "messages" and value.lstrip()[:1] != "["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{name}: {column} is a string but not JSON ({error})") from error
