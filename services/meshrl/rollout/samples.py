"""Turns a played episode into rollouts that training can use, or into the reason why it cannot.

Shapes: T tokens of a sample.
"""

from __future__ import annotations

import inspect
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.env import Env
from verifiers.v1.episode import Episode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, Trace
from verifiers.v1.types import Message

from meshrl.rollout.engines.calls import Call, Session
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import MessageSpan, Rollout, Sample, VersionSpan
from meshrl.wire.types.routes import Routes

_NO_FLOAT = re.compile(r"float\(\) argument must be .* not '(\w+)'|could not convert string to float")
_PLAIN_FUNCTION = "TypeError: An asyncio.Future, a coroutine or an awaitable is required"
MOST_REWARD = float(np.finfo(np.float32).max)
"""Advantages are of single precision; means and deviations of larger rewards would not be finite."""
UNSCORED_STOPS = frozenset({"setup_timeout", "finalize_timeout", "scoring_timeout"})


def rollouts_of(
    env: Env,
    episode: Episode,
    sessions: Mapping[str, Session],
    *,
    group_id: str,
    environment: str,
    conversations: bool = False,
) -> tuple[Rollout, ...]:
    """One rollout for each agent whose tokens train the policy, with `conversations` also its messages. Raises
    MeshError when the episode failed or was not scored to its end."""
    if not env.complete(episode):
        raise _failure(env, episode, sessions)
    trainable = [trace for trace in episode.traces if trace.agent.trainable and trace.ok]
    if not trainable:
        raise MeshError(Reason.ENVIRONMENT_FAILED, f"{environment} ended without a run of an agent that trains")
    single = len(agent_config_fields(env.config)) < 2  # whoever came to play: a name is the same in every episode
    return tuple(
        replace(
            _rollout(trace, sessions[trace.id], group_id, environment, "" if single else trace.agent.name),
            episode_id=trace_uuid(episode.id),
            conversations=conversations_of(trace) if conversations else (),
        )
        for trace in trainable
    )


def trace_uuid(trace_id: str) -> str:
    try:
        return str(uuid.UUID(trace_id))
    except ValueError:
        return trace_id


def _failure(env: Env, episode: Episode, sessions: Mapping[str, Session]) -> MeshError:
    failed = [trace for trace in episode.traces if not trace.ok]
    for trace in failed:
        session = sessions.get(trace.id)
        if session is not None and session.failure is not None:
            return session.failure
    errors = [*episode.errors, *chain.from_iterable(trace.errors for trace in failed)]
    if not errors:
        return MeshError(Reason.ENVIRONMENT_FAILED, "the episode did not complete and recorded no error")
    last = errors[-1]
    if last.status_code is not None and 400 <= last.status_code < 500:  # the task itself: another try ends the same way
        return MeshError(Reason.INVALID_REQUEST, f"the task cannot be played: {last.message}")
    unscored = next((text for trace in failed if (text := _no_number(env, trace, last.message))), "")
    advice = "; write each reward and metric as `async def`" if last.message.endswith(_PLAIN_FUNCTION) else ""
    return MeshError(Reason.ENVIRONMENT_FAILED, unscored or f"{last.type}: {last.message}{advice}")


def _no_number(env: Env, trace: Trace, message: str) -> str:
    """Empty for other errors. verifiers makes a float of each in turn, and keeps None for those to come. A function
    that returns several by name has no entry of its own, so that beside one the name is unknown."""
    told, task_type = _NO_FLOAT.search(message), type(env.taskset).task_type()
    values = {**trace.metrics, **trace.rewards}
    name = next((name for name, value in values.items() if value is None), None)
    functions = {
        name: function
        for cls in reversed(task_type.__mro__)
        for name, function in vars(cls).items()
        if callable(function) and (hasattr(function, "reward") or hasattr(function, "metric"))
    }
    if told is None or name is None or not functions.keys() <= values.keys():
        return ""
    came = "None" if told[1] == "NoneType" else f"a {told[1]}" if told[1] else "text"
    code = inspect.unwrap(functions[name]).__code__ if name in functions else None
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    kind = "reward" if name in trace.rewards else "metric"
    return f"{kind} {name!r}{place} returned {came}; return a number in every case, such as 0.0"


def _rollout(trace: Trace, session: Session, group_id: str, environment: str, agent: str) -> Rollout:
    unscored = sorted(name for name, reward in trace.rewards.items() if reward is None)
    if unscored or trace.stop_condition in UNSCORED_STOPS:
        what = f"rewards without a value: {', '.join(unscored)}" if unscored else f"ended by {trace.stop_condition}"
        raise MeshError(Reason.ENVIRONMENT_FAILED, f"the rollout was not scored ({what})")
    parts = {name: reward.value for name, reward in trace.rewards.items()}
    reward = sum(parts.values())
    if not all(abs(value) <= MOST_REWARD for value in (*parts.values(), reward)):  # nor is NaN
        raise MeshError(Reason.ENVIRONMENT_FAILED, f"a reward is not a finite number of single precision: {parts}")
    last = next((call for call in reversed(trace.calls) if call.error is None), None)
    timing = trace.timing
    sampling = trace.agent.config.sampling
    temperature = 1.0 if sampling is None or sampling.temperature is None else float(sampling.temperature)
    return Rollout(
        rollout_id=trace_uuid(trace.id),
        group_id=group_id,
        task_key=trace.task.key or "",
        environment=environment,
        agent=agent,
        samples=samples_of(
            trace.branches, session.calls, temperature, session.routes_of if session.keeps_routes else None
        ),
        reward=reward,
        reward_parts=parts,
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        finish_reason=(last.finish_reason if last is not None else None) or trace.stop_condition or "",
        truncated=trace.is_truncated,
        num_turns=trace.num_turns,
        timings_s={
            "setup": timing.boot.duration + timing.setup.duration,
            "generation": timing.agent.model.duration,
            "scoring": timing.finalize.duration + timing.scoring.duration,
            "total": max(0.0, timing.scoring.end - timing.start),
        },
        traceparent=session.traceparent,
        completion=trace.last_reply,
        start_time=timing.start,
        end_time=timing.scoring.end or None,
    )


def samples_of(
    branches: Sequence[Branch],
    calls: Sequence[Call],
    temperature: float,
    routes_of: Callable[[NDArray[np.int32]], Routes | None] | None = None,
) -> tuple[Sample, ...]:
    """One sample for each branch in which the policy sampled a token. A token that several branches share trains in the
    first only. Raises MeshError INTERNAL when no model call accounts for a sampled token's version."""
    unclaimed = list(calls)
    spans_of_node: dict[int, tuple[VersionSpan, ...]] = {}
    trained: set[int] = set()
    samples: list[Sample] = []
    for branch in branches:
        if not branch.trainable:
            continue
        for node in branch.nodes:
            if node.sampled and id(node) not in spans_of_node:
                spans_of_node[id(node)] = _claim(node, unclaimed)
        fresh = [node for node in branch.nodes if node.sampled and id(node) not in trained and any(node.mask)]
        if fresh:
            made = _sample(branch, {id(node) for node in fresh}, spans_of_node, temperature)
            samples.append(made if routes_of is None else replace(made, routed_experts=routes_of(made.token_ids)))
            trained.update(id(node) for node in fresh)
    return tuple(samples)


def _claim(node: MessageNode, unclaimed: list[Call]) -> tuple[VersionSpan, ...]:
    num_sampled = sum(node.mask)
    if not num_sampled:
        return ()
    sampled = node.token_ids[-num_sampled:]
    for position, call in enumerate(unclaimed):
        if call.completion_ids == sampled:
            del unclaimed[position]
            return call.version_spans
    raise MeshError(Reason.INTERNAL, f"no model call accounts for a message of {num_sampled} sampled tokens")


def _sample(
    branch: Branch, fresh: set[int], spans_of_node: Mapping[int, tuple[VersionSpan, ...]], temperature: float
) -> Sample:
    token_ids: list[int] = []
    for node in branch.nodes:
        token_ids.extend(node.token_ids)
    mask_T = np.zeros(len(token_ids), dtype=np.bool_)
    logprobs_T = np.zeros(len(token_ids), dtype=np.float32)
    versions: list[VersionSpan] = []
    messages: list[MessageSpan] = []
    position = 0
    for node in branch.nodes:
        end = position + len(node.token_ids)
        if end > position:
            messages.append(_message_span(node, position))
        if id(node) in fresh:
            start = end - sum(node.mask)
            mask_T[start:end] = True
            logprobs_T[start:end] = node.logprobs
            for span in spans_of_node[id(node)]:
                _append_span(versions, replace(span, start=start + span.start, end=start + span.end))
        position = end
    return Sample(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=mask_T,
        logprobs=logprobs_T,
        version_spans=tuple(versions),
        message_spans=tuple(messages),
        temperature=temperature,
    )


def _message_span(node: MessageNode, start: int) -> MessageSpan:
    end = start + len(node.token_ids)
    content = [start + place for place, belongs in enumerate(node.is_content) if belongs]
    told = len(node.is_content) == len(node.token_ids)
    return MessageSpan(
        start=start,
        end=end,
        role=node.message.role,
        text=_text(node.message),
        content_start=(content[0] if content else start) if told else None,
        content_end=(content[-1] + 1 if content else start) if told else None,
    )


def _text(message: Message) -> str:
    content = message.content or ""
    if not isinstance(content, str):  # parts, of which only text has something to read
        content = "".join(getattr(part, "text", "") for part in content)
    reasoning = getattr(message, "reasoning_content", None)
    calls = [f"{call.name}({call.arguments})" for call in getattr(message, "tool_calls", None) or ()]
    return "\n".join(part for part in (reasoning and f"<think>{reasoning}</think>", content, *calls) if part)


def _append_span(spans: list[VersionSpan], span: VersionSpan) -> None:
    last = spans[-1] if spans else None
    if last is not None and (last.end, last.version, None) == (span.start, span.version, span.prompt_version):
        spans[-1] = replace(last, end=span.end)
    else:
        spans.append(span)


def conversations_of(trace: Trace) -> tuple[str, ...]:
    """{"messages", "tools"} of OpenAI's chat API for each branch that trains; a compaction, for example, makes
    several."""
    conversations = []
    for branch in trace.branches:
        if not branch.trainable:
            continue
        conversation: dict[str, object] = {"messages": [_chat_message(node.message) for node in branch.nodes]}
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


def _chat_message(message: Message) -> dict[str, object]:
    """Without empty fields and opaque state of a provider, of which nothing can be learned."""
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
