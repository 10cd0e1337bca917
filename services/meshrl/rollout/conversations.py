"""What was said in a rollout, in the shape of OpenAI's chat API; fed by `samples` with verifiers' traces.

Where the trace keeps several histories, as after a compaction, each is a conversation of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from verifiers.v1.trace import Trace
from verifiers.v1.types import Message, Tool


def conversations_of(trace: Trace) -> tuple[str, ...]:
    """JSON of {"messages": [...], "tools": [...]} for each branch of the trace that trains."""
    return tuple(
        json.dumps(_conversation([node.message for node in branch.nodes], branch.tools), ensure_ascii=False)
        for branch in trace.branches
        if branch.trainable
    )


def _conversation(messages: Sequence[Message], tools: Sequence[Tool]) -> dict[str, object]:
    told: dict[str, object] = {"messages": [_message(message) for message in messages]}
    if tools:
        told["tools"] = [_tool(tool) for tool in tools]
    return told


def _message(message: Message) -> dict[str, object]:
    """One message without what it has not. Opaque state of a provider is left out: nothing can be learned from it."""
    told: dict[str, object] = message.model_dump(
        mode="json", exclude_none=True, exclude={"provider_state", "tool_calls"}
    )
    told.setdefault("content", "")
    if calls := getattr(message, "tool_calls", None):
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return told


def _tool(tool: Tool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
