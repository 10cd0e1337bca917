"""Reads rows of conversations from a file or the hub; first stage of fine-tuning, feeds tokenization."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.sft.config import DataConfig

Row = Mapping[str, Any]  # columns by name, as JSON or a dataset has them
Message = Row
Tool = Row


class DataError(Exception):
    """The data cannot be used; the message says which row and what to change."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row. Messages before `learn_from` are context whatever their role."""

    row: int
    messages: tuple[Message, ...]
    learn_from: int = 0
    tools: tuple[Tool, ...] = ()
    template_options: Mapping[str, object] = field(default_factory=dict)


def load_conversations(config: DataConfig) -> list[Conversation]:
    """Reads every row of the data. Raises DataError for data that is missing, malformed or empty."""
    conversations = [_conversation(row, index) for index, row in enumerate(_rows(config))]
    if not conversations:
        raise DataError(f"data.name {config.name!r} holds no rows")
    return conversations


def _rows(config: DataConfig) -> Iterator[Row]:
    path = Path(config.name)
    if path.suffix in (".jsonl", ".json"):
        if not path.is_file():
            raise DataError(f"data.name {config.name!r}: there is no such file")
        return _json_lines(path)
    return _dataset(config)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error}); each line must be one object") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object with columns, got {type(row).__name__}")
            yield row


def _dataset(config: DataConfig) -> Iterator[Row]:
    try:
        import datasets  # only needed for parquet files and the hub
    except ImportError as error:
        raise DataError(
            f"data.name {config.name!r} needs the datasets package: pip install datasets, or use a .jsonl file"
        ) from error
    try:
        if Path(config.name).suffix == ".parquet":
            rows = datasets.load_dataset("parquet", data_files=config.name, split="train")
        else:
            rows = datasets.load_dataset(config.name, config.subset, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot load data.name {config.name!r} (split {config.split!r}): {error}") from error
    return iter(rows)


def _conversation(row: Row, index: int) -> Conversation:
    """messages take precedence over prompt and completion, as users of both columns expect."""
    if row.get("messages") is not None:
        messages, learn_from = _messages(row["messages"], index, "messages", role="user"), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = _messages(row["prompt"], index, "prompt", role="user")
        messages = (*prompt, *_messages(row["completion"], index, "completion", role="assistant"))
        learn_from = len(prompt)
    else:
        raise DataError(f"row {index} has columns {sorted(row)}; expected messages, or prompt and completion")
    return Conversation(
        row=index,
        messages=messages,
        learn_from=learn_from,
        tools=_tools(row, index),
        template_options=row.get("chat_template_kwargs") or {},
    )


def _messages(value: object, index: int, column: str, *, role: str) -> tuple[Message, ...]:
    """A list of messages; a plain string is one message of `role`."""
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"row {index}: {column} must be a list of messages or a string, got {type(value).__name__}")
    for message in value:
        if not isinstance(message, Mapping) or "role" not in message:
            raise DataError(f"row {index}: each message of {column} needs a role and content, got {message!r:.80}")
    return tuple(value)


def _tools(row: Row, index: int) -> tuple[Tool, ...]:
    """Tool definitions in OpenAI's shape; those of verifiers (tool_defs) are brought into it."""
    value = row.get("tools") if row.get("tools") is not None else row.get("tool_defs")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"row {index}: tools is a string but not JSON ({error})") from error
    if not value:
        return ()
    if not isinstance(value, Sequence):
        raise DataError(f"row {index}: tools must be a list, got {type(value).__name__}")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in value)
