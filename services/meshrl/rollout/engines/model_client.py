"""The model client that verifiers uses for the policy: messages to tokens and back.

verifiers' own train client goes through a second HTTP client, keeps no policy versions and cannot choose an engine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from opentelemetry.trace import SpanKind, Tracer
from pydantic import JsonValue
from verifiers.v1.clients import Client, TrainClientConfig
from verifiers.v1.clients.train import response_from_generate, serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession
from verifiers.v1.types import Response, SamplingConfig

from meshrl.core.waiting import Pace
from meshrl.rollout.engines.calls import Call, Session, SessionBook, read
from meshrl.rollout.engines.chat_servers import ChatServers
from meshrl.rollout.engines.logprobs_mode import reshaping
from meshrl.rollout.engines.router import EngineRefusedError, EngineRouter
from meshrl.rollout.rendering.renderer import PolicyRenderer, UnrenderableError
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import context_from
from meshrl.wire.types import Sampling

_NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""An engine's own defaults (of a generation_config.json) would change the distribution unnoticed."""


class EngineClient(Client):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Keeps which version sampled which token. `seq_len` bounds prompt plus completion, in tokens. By `pace` the
    rollouts of this process share the loop."""

    def __init__(self, renderer: PolicyRenderer, router: EngineRouter, tracer: Tracer, *, seq_len: int) -> None:
        self._renderer = renderer
        self._tracer = tracer
        self._router = router
        self.book = SessionBook()
        self._seq_len = seq_len
        self.pace = Pace()

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, JsonValue],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Raises ProviderError; the session's `failure` is then the error to report."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the policy speaks the chat completions API only, got {type(dialect).__name__};"
                " use a harness that calls /v1/chat/completions",
                status_code=400,
            )
        assert turn is not None  # the interception server has resolved the request
        model, session_id = str(body["model"]), session_id or ""
        session = self.book.get(session_id) or Session()
        wire_tools = [tool_to_wire(tool) for tool in turn.tools] or None
        if wire_tools and not self._renderer.supports_tools:
            raise ProviderError(
                "the renderer of this model cannot render tools; set rollout.renderer to one that can",
                status_code=400,
            )
        try:
            prompt = await self._renderer.prompt(turn, wire_tools)
        except UnrenderableError as error:
            raise ProviderError(str(error), status_code=400) from error
        with self._tracer.start_as_current_span(
            f"chat {model}", context=context_from(session.traceparent), kind=SpanKind.CLIENT
        ) as span:
            sampled = await self._sample(session, session_id, model, prompt.token_ids, sampling)
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.model": model,
                    "gen_ai.usage.input_tokens": len(prompt.token_ids),
                    "gen_ai.usage.output_tokens": len(sampled.completion_ids),
                    "gen_ai.response.finish_reasons": (sampled.finish_reason or "",),
                    "server.address": session.engine or "",
                }
            )
        parsed = self._renderer.parse(sampled.completion_ids, prompt.token_ids, wire_tools)
        calls_a_tool = any(getattr(call.status, "name", "") == "OK" for call in parsed.tool_calls)
        finish_reason = "tool_calls" if sampled.finish_reason == "stop" and calls_a_tool else sampled.finish_reason
        generated = {
            "request_id": sampled.request_id,
            "prompt_ids": prompt.token_ids,
            "completion_ids": sampled.completion_ids,
            "completion_logprobs": sampled.logprobs,
            "finish_reason": finish_reason,
            "content": parsed.content,
            "reasoning_content": parsed.reasoning_content,
            "tool_calls": parsed.tool_calls,
            "prompt_attribution": prompt.attribution,
        }
        response = response_from_generate(generated, model, turn if prompt.bridged else None)
        response.raw = serialize_completion(response, model)
        return response

    async def _sample(
        self, session: Session, session_id: str, model: str, prompt_ids: list[int], sampling: SamplingConfig
    ) -> Call:
        seq_len = self._seq_len if session.seq_len is None else min(session.seq_len, self._seq_len)
        room = seq_len - len(prompt_ids)
        if room < 1:
            key = "rollout.seq_len" if seq_len == self._seq_len else "the environment's seq_len"
            raise ProviderError(
                f"Prompt length ({len(prompt_ids)}) exceeds maximum context length ({seq_len - 1}): {key} is {seq_len};"
                " raise it",
                status_code=400,
            )
        params = _NEUTRAL | sampling.model_dump(exclude_none=True)
        cache_salt = params.pop("cache_salt", None)
        if "seed" in params:
            params["seed"] = session.next_seed(params["seed"])
        params["max_tokens"] = min(params.get("max_tokens", room), room)
        params["stop_token_ids"] = [*self._renderer.stop_token_ids, *session.stop_token_ids]
        params["logprobs"] = 1
        params.setdefault("skip_special_tokens", False)
        if session.keeps_routes:
            params["routed_experts_prompt_start"] = session.routes_from(prompt_ids)
        request = {"model": model, "token_ids": prompt_ids, "sampling_params": params}
        if cache_salt is not None:
            request["cache_salt"] = cache_salt
        need = session.requirement
        if not session.scores_only:  # an agent may sample otherwise than its group's request
            used = {name: params[name] for name in _NEUTRAL}
            need = replace(need, reshaped_by=reshaping(Sampling(**used)))
        try:
            body = json.dumps(request).encode()
            answer = await self._router.generate(session, session_id, body, need, prompt_tokens=len(prompt_ids))
            session.doing = ""
            await self.pace.turn()  # answers may come a thousand at a time
            sampled = read(answer)
            if session.engine is not None and answer.timing is not None:
                self._router.engines.sampled(session.engine, answer.timing, len(sampled.completion_ids))
            session.syncs.update(part for part in answer.syncs.split(",") if part)
            for span in sampled.version_spans:
                if not need.met_by(span.version):
                    raise MeshError(
                        Reason.VERSION_NOT_AVAILABLE,
                        f"{need.describe()} is needed; tokens {span.start} to {span.end} came from version"
                        f" {span.version}",
                    )
        except EngineRefusedError as error:
            if error.status >= 500:
                session.failure = MeshError(Reason.ENGINE_FAILED, str(error))
            raise ProviderError(str(error), status_code=error.status) from error
        except MeshError as error:
            session.failure = error
            raise ProviderError(error.message, status_code=502) from error
        finally:
            session.doing = ""
        if session.keeps_routes and sampled.routes is not None:
            tokens = np.array([*prompt_ids, *sampled.completion_ids], dtype=np.int32)
            session.calls.append(replace(sampled, tokens=tokens))
        else:
            session.calls.append(replace(sampled, routes=None))
        return sampled


class EngineInterception(Interception):  # type: ignore[misc]  # verifiers is untyped for the checker
    """verifiers' interception, with the policy's calls given to `client`. `inner` has an owner; `endpoint` stands for
    the engines in the agents' configuration."""

    def __init__(self, inner: Interception, client: EngineClient | ChatServers, endpoint: TrainClientConfig) -> None:
        super().__init__()
        self._inner = inner
        self._endpoint = endpoint
        self._client = client

    async def start(self) -> None:
        """Nothing to start: `inner` runs already."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        if (held := self._client.book.get(session.trace.id)) is not None:
            held.reachable = True
        async with self._inner.acquire(session) as slot:
            if session.ctx.client == self._endpoint:  # an agent with an endpoint of its own keeps it
                session.client = self._client
            yield slot
