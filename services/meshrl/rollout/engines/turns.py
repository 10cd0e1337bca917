"""Takes a turn of an agent that plays in this process straight to the model client, without HTTP in between.

The in-process harness (`meshrl.environments.harness`) asks for a completion here; the model client samples it. Around
it, the work of verifiers' interception server is done in the same order and with the same outcome: limits and stop
conditions before it, the turn committed to the trace and the call recorded after it. An agent whose task rewrites or
polices requests, whose network is restricted or that has an endpoint of its own goes through the server, which does
more.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loguru import logger
from pydantic import ValidationError
from verifiers.v1 import graph
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import parse_message
from verifiers.v1.errors import ProviderError, RolloutError, TaskError
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import Error, ModelCall, TimeSpan
from verifiers.v1.types import AssistantMessage, Message, Response, Tool, ToolMessage

from meshrl.environments.harness import ChatMessage, RefusedCall

if TYPE_CHECKING:
    from meshrl.rollout.engines.model_client import EngineClient

_CHAT = ChatDialect()


def plays_in_process(session: RolloutSession) -> bool:
    """True when nothing stands between an agent and its model but limits and stop conditions on its trace."""
    hooks = (session.request_interceptors, session.response_interceptors, session.request_stops, session.response_stops)
    single = getattr(session.ctx.sampling, "n", None) in (None, 1)  # the server refuses more completions than one
    return single and not any(hooks) and not session.network_policy.network_restricted


class DirectTurns:
    """The turns of one agent's run, one after another."""

    def __init__(self, session: RolloutSession, client: EngineClient) -> None:
        self._session = session
        self._client = client
        self._tool_names: dict[str, str] = {}
        try:
            self._sampling = _CHAT.parse_sampling(session.ctx.sampling.model_dump(exclude_none=True))
        except ValidationError:  # as the server: what cannot be recorded must not fail the call
            self._sampling = None

    def read(self, messages: Sequence[ChatMessage]) -> list[Message]:
        typed: list[Message] = []
        for raw in messages:
            message = parse_message(raw)
            if isinstance(message, ToolMessage) and message.name is None:
                name = self._tool_names.get(message.tool_call_id)
                message = message if name is None else message.model_copy(update={"name": name})
            elif isinstance(message, AssistantMessage):
                self._tool_names.update((call.id, call.name) for call in message.tool_calls or ())
            typed.append(message)
        return typed

    async def complete(self, messages: list[Message], tools: list[Tool]) -> AssistantMessage | RefusedCall | None:
        """One completion; None when the rollout is stopped instead. A refusal is the server's would-be answer; its
        cause is noted for verifiers to report."""
        session = self._session
        if (refusal := await self._refused()) is not None:
            return refusal
        if session.stopped:
            return None
        turn = graph.prepare_turn(session.trace, messages, tools)
        session.trace.preview(turn, turn.tail)
        if session.on_turn_input is not None:
            on_input, session.on_turn_input = session.on_turn_input, None
            on_input()
        session.error = None
        response: Response | None = None
        node: int | None = None
        started_s = time.time()
        try:
            response = await self._client.respond(session.ctx.model, session.ctx.sampling, session.trace.id, turn)
            if not session.stopped:
                node = turn.commit(response)
        except Exception as error:  # noqa: BLE001  # as the server: whatever breaks in a call is its answer
            if isinstance(error, RolloutError):
                session.error = error
            self._record(started_s, response=response, error=error)
            logger.warning("model call failed: id={} {}: {}", session.trace.id, type(error).__name__, error)
            return _refusal(error)
        finally:
            if node is None:
                turn.abandon()
        self._record(started_s, node, response)
        if node is None:
            return None
        self._tool_names.update((call.id, call.name) for call in response.message.tool_calls or ())
        return _as_sent_back(response.message)

    async def _refused(self) -> RefusedCall | None:
        session = self._session
        if session.stopped:
            return None
        try:
            await session.refused()
        except Exception as error:  # noqa: BLE001  # code of the task's own: the rollout fails with it
            if not isinstance(error, RolloutError):
                error = TaskError(f"model boundary hook failed: {type(error).__name__}: {error}")
            session.error = error
            logger.warning("rollout {} failed: {}: {}", session.trace.id, type(error).__name__, error)
            return _refusal(error)
        return None

    def _record(
        self,
        started_s: float,
        node: int | None = None,
        response: Response | None = None,
        error: Exception | None = None,
    ) -> None:
        trace = self._session.trace
        told = None
        if error is not None:
            lines = None if isinstance(error, ProviderError) else "".join(traceback.format_exception(error))
            told = Error(
                type=type(error).__name__,
                message=str(error),
                status_code=getattr(error, "status_code", None),
                traceback=lines,
            )
        trace.calls.append(
            ModelCall(
                node=node,
                model=self._session.ctx.model,
                sampling=self._sampling,
                endpoint=_CHAT.upstream_path,
                finish_reason=None if response is None else response.finish_reason,
                usage=None if response is None else response.usage,
                time=TimeSpan(start=started_s, end=time.time()),
                error=told,
            )
        )
        trace.notify()


def _as_sent_back(message: AssistantMessage) -> AssistantMessage:
    """The reply as the next request has it: without empty text or reasoning."""
    content, reasoning = message.content or None, message.reasoning_content or None
    if (content, reasoning) == (message.content, message.reasoning_content) and message.provider_state is None:
        return message
    return AssistantMessage(content=content, reasoning_content=reasoning, tool_calls=message.tool_calls)


def _refusal(error: Exception) -> RefusedCall:
    status = getattr(error, "status_code", 502) if isinstance(error, RolloutError) else 502
    return RefusedCall(status, json.dumps(_CHAT.error_body(str(error))))
