"""The messages of a rollout in the form of OpenAI's chat API; made by `samples` from verifiers' traces when asked for.

Where the trace keeps several histories, as after a compaction, each is a conversation of its own.
"""

from __future__ import annotations

import json

from verifiers.v1.trace import Trace
from verifiers.v1.types import Message


def conversations_of(trace: Trace) -> tuple[str, ...]:
    """JSON of {"messages": [...], "tools": [...]} for each branch of the trace that trains."""
    conversations = []
    for branch in trace.branches:
        if not branch.trainable:
            continue
        conversation: dict[str, object] = {"messages": [_message(node.message) for node in branch.nodes]}
        if branch.tools:
            conversation["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                }
                for tool in branch.tools
            ]
        conversations.append(json.dumps(conversation, ensure_ascii=False))
    return tuple(conversations)


def _message(message: Message) -> dict[str, object]:
    """One message, without empty fields. Opaque state of a provider is left out: nothing can be learned from it."""
    fields: dict[str, object] = message.model_dump(
        mode="json", exclude_none=True, exclude={"provider_state", "tool_calls"}
    )
    fields.setdefault("content", "")
    if calls := getattr(message, "tool_calls", None):
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return fields
