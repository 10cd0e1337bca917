"""Samples the policy from plain OpenAI-compatible servers, which give text and no tokens: for evaluations and teachers.

verifiers' own client makes the HTTP calls, so every harness and API dialect goes. Here a server is chosen for each
call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from opentelemetry.trace import SpanKind, Tracer
from pydantic import JsonValue
from verifiers.v1.clients import Client, EvalClientConfig
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import ClientTimeoutConfig
from verifiers.v1.dialects import Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import Response, SamplingConfig

from meshrl.client.backoff import Backoff
from meshrl.core.waiting import Pace
from meshrl.rollout.config import ClientConfig
from meshrl.rollout.engines.calls import Session, SessionBook
from meshrl.rollout.engines.engine_table import EngineTable, Requirement
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import context_from
from meshrl.wire.types import Rollout, RolloutRequest

AGAIN = frozenset({408, 429, 500, 502, 503, 504, 529})
"""The same call may succeed later, at this server or another."""
PAUSE_S = (0.5, 8.0)

AnswerT = TypeVar("AnswerT")


def refuse_training(request: RolloutRequest) -> None:
    if not request.scores_only:
        raise MeshError(
            Reason.INVALID_REQUEST,
            "this rollout service samples from /v1/chat/completions (rollout.client.api), which gives no token ids or"
            " logprobs to train on; train with engines of the generate API (`inference`, or vLLM with its"
            " /inference/v1/generate), and use this service for evaluations",
        )


def refuse_without_tokens(rollouts: Sequence[Rollout]) -> None:
    """Raises MeshError INVALID_REQUEST if an agent took its turns at an endpoint of its own."""
    for rollout in rollouts:
        if rollout.num_turns and not rollout.samples:
            agent = rollout.agent or "agent"
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"{agent} of {rollout.environment} is to be trained, but samples from an endpoint of its own"
                f" (args.{agent}.client), which gives no token ids; leave that out, or use it in evaluations",
            )


class ChatServers(Client):  # type: ignore[misc]  # verifiers is untyped for the checker
    """The policy behind `client.base_url`. `engines` lists the servers, which have no versions."""

    def __init__(self, config: ClientConfig, tracer: Tracer, *, api_key: str | None) -> None:
        urls = [api_url(url) for url in config.base_url]
        self.engines = EngineTable(urls, config.pool)
        self.on_look: Callable[[], None] = lambda: None  # nothing about such a server is found out by looking
        self._config = config
        self.book = SessionBook()
        self.pace = Pace()
        self._tracer = tracer
        timeout = ClientTimeoutConfig(connect=config.connect_deadline_s, read=config.call_deadline_s)
        self._clients: dict[str, EvalClient] = {}
        for url in urls:
            self._clients[url] = EvalClient(EvalClientConfig(base_url=url, api_key_var="", timeout=timeout))
            self._clients[url].api_key = api_key or "EMPTY"
            self.engines.observe(url, 0)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def require(self, need: Requirement) -> None:
        """Raises MeshError for a version bound or an unknown pool."""
        if need.pool and need.pool not in self.engines.known_pools:
            raise MeshError(Reason.INVALID_REQUEST, f"no engine pool {need.pool!r} here")
        if not need.met_by(0):
            raise MeshError(
                Reason.VERSION_NOT_AVAILABLE,
                f"{need.describe()} is needed, but servers of /v1/chat/completions have no versions",
            )

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
        session, model = self._session(session_id), str(body.get("model", ""))
        with self._tracer.start_as_current_span(
            f"chat {model}", context=context_from(session.traceparent), kind=SpanKind.CLIENT
        ) as span:
            response = await self._ask(
                session, lambda client: client.get_response(dialect, body, sampling, session_id, turn, headers)
            )
            span.set_attributes({"gen_ai.operation.name": "chat", "gen_ai.request.model": model})
            span.set_attribute("server.address", session.engine or "")
        return response

    async def relay(
        self,
        dialect: Dialect,
        body: dict[str, JsonValue],
        session_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> RelayReply:
        """A completion that a harness reads as it streams. Raises ProviderError."""
        return await self._ask(
            self._session(session_id), lambda client: client.relay(dialect, body, session_id, headers)
        )

    async def relay_aux(
        self, dialect: Dialect, route: str, body: dict[str, JsonValue], headers: Mapping[str, str] | None = None
    ) -> dict[str, JsonValue]:
        """Such as counting tokens. Raises ProviderError."""
        return await self._ask(Session(), lambda client: client.relay_aux(dialect, route, body, headers))

    def _session(self, session_id: str | None) -> Session:
        return self.book.get(session_id or "") or Session()

    async def _ask(self, session: Session, call: Callable[[EvalClient], Awaitable[AnswerT]]) -> AnswerT:
        give_up_at = time.monotonic() + self._config.failover_s
        skip: set[str] = set()
        backoff = Backoff(*PAUSE_S, jitter=0.0)
        while True:
            server = self.engines.select(session.requirement, prefer=session.engine, skip=skip)
            if server is None:  # all were asked: after a pause any may be asked again
                session.doing = "waiting for a server of /v1/chat/completions to take its model call"
                await asyncio.sleep(max(0.0, min(backoff.next_s(), give_up_at - time.monotonic())))
                skip = set()
                continue
            session.engine, session.doing = server.url, f"in a model call at {server.url}"
            running = server.rate.began(time.monotonic())
            try:
                return await call(self._clients[server.url])
            except ProviderError as error:
                if error.status_code in AGAIN and time.monotonic() < give_up_at:
                    skip.add(server.url)
                    continue
                if error.status_code in AGAIN:
                    why = str(error) or type(error.__cause__).__name__  # a timeout of httpx has no text of its own
                    detail = f"{server.url} failed for {self._config.failover_s:g} s: {why}"
                    session.failure = MeshError(Reason.ENGINE_FAILED, detail)
                raise
            finally:
                server.rate.ended(running, time.monotonic())
                session.doing = ""


def api_url(url: str) -> str:
    """With /v1 if the server is named without a path."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"
