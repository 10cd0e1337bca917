"""The model client that verifiers uses for the policy: messages to tokens, tokens to an engine, tokens back to a
message.

Fed by verifiers' interception server with one turn at a time; `engines` routes the call. It takes the place of
verifiers' own train client because that one goes through a second HTTP client, keeps no policy versions and cannot
choose an engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from opentelemetry.trace import SpanKind, Tracer
from verifiers.v1.clients import Client, TrainClientConfig
from verifiers.v1.clients.train import response_from_generate, serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession
from verifiers.v1.types import Response, SamplingConfig

from meshrl.core.telemetry.tracing import context_from
from meshrl.rollout.engines.answers import read
from meshrl.rollout.engines.engine_table import Requirement
from meshrl.rollout.engines.logprobs_mode import reshaping
from meshrl.rollout.engines.router import EngineRefusedError, EngineRouter
from meshrl.rollout.engines.sessions import Call, Session, SessionBook
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Sampling

T = TypeVar("T")

_NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sent where nothing else is said: an engine's own defaults (of a generation_config.json) would change the distribution
without anybody knowing."""

INLINE_CHARACTERS = 16_384
"""Prompts up to this long are tokenized on the event loop: the hop to a thread would cost more than the work."""


class RendererHost:
    """The process's chat renderer. Tokenizers are not safe to share between threads, so it does one thing at a time."""

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], T], characters: int) -> T:
        """Runs `work`, which uses the renderer on a prompt of about so many characters."""
        async with self._lock:
            return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


class EngineClient(Client):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Samples the policy's turns from the engine pool, and keeps which version sampled which token.

    `seq_len` bounds prompt plus completion, in tokens.
    """

    def __init__(
        self, host: RendererHost, router: EngineRouter, book: SessionBook, tracer: Tracer, *, seq_len: int
    ) -> None:
        self._host = host
        self._tracer = tracer
        self._router = router
        self._book = book
        self._seq_len = seq_len
        self._stop_token_ids: list[int] = list(host.renderer.get_stop_token_ids())

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One completion of a turn. Raises ProviderError; the session's `failure` then says what to report."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the policy speaks the chat completions API only, got {type(dialect).__name__};"
                " use a harness that calls /v1/chat/completions",
                status_code=400,
            )
        session = self._book.get(session_id or "") or Session()
        if turn is None:
            request = dialect.parse_request(body)
            prompt, tools, tail = request.messages, request.tools, []
        else:
            prompt, tools, tail = turn.prompt, turn.tools, turn.tail
        wire_tools = [tool_to_wire(tool) for tool in tools] if tools else None
        if wire_tools and not getattr(self._host.renderer, "supports_tools", True):
            raise ProviderError(
                "the renderer of this model cannot render tools; set rollout.renderer to one that can",
                status_code=400,
            )
        prompt_ids, attribution, bridged = await self._render(turn, prompt, tail, wire_tools)
        with self._tracer.start_as_current_span(
            f"chat {body['model']}", context=context_from(session.traceparent), kind=SpanKind.CLIENT
        ) as span:
            result = await self._sample(session, session_id or "", body["model"], prompt_ids, sampling)
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.model": body["model"],
                    "gen_ai.usage.input_tokens": len(prompt_ids),
                    "gen_ai.usage.output_tokens": len(result["completion_ids"]),
                    "gen_ai.response.finish_reasons": (result["finish_reason"] or "",),
                    "server.address": session.engine or "",
                }
            )
        parsed = self._host.renderer.parse_response(result["completion_ids"], prompt_ids=prompt_ids, tools=wire_tools)
        finish = result["finish_reason"]
        if finish == "stop" and any(_is_usable(call) for call in parsed.tool_calls):
            finish = "tool_calls"
        result.update(
            finish_reason=finish,
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=parsed.tool_calls,
            prompt_attribution=attribution,
        )
        response = response_from_generate(result, body["model"], turn if bridged else None)
        response.raw = serialize_completion(response, body["model"])
        return response

    def doing(self, session_id: str, what: str) -> None:
        """The agent's harness says what it waits for; "" when that is over."""
        if (session := self._book.get(session_id)) is not None:
            session.doing = what

    def reachable(self, session_id: str) -> None:
        """The agent has got the address for its model calls; its tool servers start next."""
        if (session := self._book.get(session_id)) is not None:
            session.reachable = True

    async def _render(
        self, turn: PendingTurn | None, prompt: list[Any], tail: list[Any], tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], Any, bool]:
        """Tokens of the prompt, their attribution, and whether they extend the last turn's tokens as they stand."""
        renderer = self._host.renderer
        messages = [message_to_wire(message) for message in prompt]
        if any(_has_image(message) for message in messages):
            raise ProviderError("images in prompts are not supported by this server", status_code=400)
        wire_tail = [message_to_wire(message) for message in tail]
        previous = turn.previous_renderer_token_ids() if turn is not None and _extends(wire_tail) else None

        def work() -> tuple[list[int], Any, bool]:
            if previous is not None:
                bridged = renderer.bridge_to_next_turn(*previous, wire_tail, tools=tools)
                if bridged is not None:
                    return bridged.token_ids, bridged, True
            rendered = renderer.render(messages, tools=tools, add_generation_prompt=True)
            return rendered.token_ids, rendered, False

        characters = sum(len(message.get("content") or "") for message in messages)
        return await self._host.run(work, characters)

    async def _sample(
        self, session: Session, session_id: str, model: str, prompt_ids: list[int], sampling: SamplingConfig
    ) -> dict[str, Any]:
        """Calls an engine; returns what `response_from_generate` wants, without the parsed text."""
        room = self._seq_len - len(prompt_ids)
        if room < 1:
            raise ProviderError(
                f"Prompt length ({len(prompt_ids)}) exceeds maximum context length ({self._seq_len - 1}).",
                status_code=400,
            )
        params = _NEUTRAL | sampling.model_dump(exclude_none=True)
        cache_salt = params.pop("cache_salt", None)
        if "seed" in params:
            params["seed"] = session.next_seed(params["seed"])
        params["max_tokens"] = min(params.get("max_tokens", room), room)
        params["stop_token_ids"] = [*self._stop_token_ids, *session.stop_token_ids]
        params["logprobs"] = 1
        params.setdefault("skip_special_tokens", False)
        request = {"model": model, "token_ids": prompt_ids, "sampling_params": params}
        if cache_salt is not None:
            request["cache_salt"] = cache_salt
        try:
            answer = await self._router.generate(
                session, session_id, json.dumps(request).encode(), _need(session, params)
            )
            sampled = read(answer)
            self._check_versions(session, sampled.spans)
        except EngineRefusedError as error:
            if error.status >= 500:
                session.failure = MeshError(Reason.ENGINE_FAILED, str(error))
            raise ProviderError(str(error), status_code=error.status) from error
        except MeshError as error:
            session.failure = error
            raise ProviderError(error.message, status_code=502) from error
        finally:
            session.doing = ""
        session.calls.append(
            Call(completion_ids=sampled.token_ids, spans=sampled.spans, prompt_version=sampled.prompt_version)
        )
        return {
            "request_id": sampled.request_id,
            "prompt_ids": prompt_ids,
            "completion_ids": sampled.token_ids,
            "completion_logprobs": sampled.logprobs,
            "finish_reason": sampled.finish_reason,
        }

    @staticmethod
    def _check_versions(session: Session, spans: tuple[tuple[int, int, int], ...]) -> None:
        """Raises VERSION_NOT_AVAILABLE when a token came from a policy that the request does not admit."""
        for start, end, version in spans:
            if not session.requirement.met_by(version):
                raise MeshError(
                    Reason.VERSION_NOT_AVAILABLE,
                    f"{session.requirement.describe()} is needed; tokens {start} to {end} came from version {version}",
                )


class EngineInterception(Interception):  # type: ignore[misc]  # verifiers is untyped for the checker
    """verifiers' interception, with the policy's calls given to the engine pool instead of to verifiers' own client.

    `inner` is started and stopped by its owner; `endpoint` is what stands for the pool in the agents' configuration.
    """

    def __init__(self, inner: Interception, client: EngineClient, endpoint: TrainClientConfig) -> None:
        super().__init__()
        self._inner = inner
        self._endpoint = endpoint
        self._client = client

    async def start(self) -> None:
        """Nothing to start: `inner` runs already."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        self._client.reachable(session.trace.id)
        async with self._inner.acquire(session) as slot:
            if session.ctx.client == self._endpoint:  # an agent with an endpoint of its own keeps it
                session.client = self._client
            yield slot


def _need(session: Session, params: Mapping[str, Any]) -> Requirement:
    """What a call with these sampling parameters needs; an agent may sample otherwise than its group's request."""
    if session.scores_only:
        return session.requirement
    sampling = Sampling(
        temperature=params["temperature"], top_p=params["top_p"], top_k=params["top_k"], min_p=params["min_p"]
    )
    return replace(session.requirement, reshaped_by=reshaping(sampling))


def _is_usable(call: Any) -> bool:
    return getattr(getattr(call, "status", None), "name", "") == "OK"


def _has_image(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") == "image_url" for part in content)


def _extends(tail: list[dict[str, Any]]) -> bool:
    """True when the new messages are tool results, then at most one user message: what a renderer can append."""
    roles = [message["role"] for message in tail]
    return bool(roles) and all(role == "tool" for role in roles[:-1]) and roles[-1] in ("tool", "user")
