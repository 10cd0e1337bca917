"""Samples turns from the engines' chat route, with token ids, logprobs and the version that sampled each token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import httpx
from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EngineEndpoint, RolloutRequest, Sampling
from meshrl_verifiers_v0.samples import Calls, Sampled

LOOK_EVERY_S = 1.0
LOOK_DEADLINE_S = 5.0
CALL_DEADLINE_S = 600.0
PROCESSED = "processed_logprobs"


@dataclass
class ChatEngine:
    """`version` is None while it does not answer."""

    url: str
    openai: AsyncOpenAI
    pool: str = ""
    version: int | None = None
    logprobs_mode: str = ""
    in_flight: int = 0


class ChatEngines:
    def __init__(self, urls: Iterable[str], hub: WeightSyncClient | None, *, api_key: str, failover_s: float) -> None:
        self._api_key = api_key
        self._hub = hub
        self._known: dict[str, ChatEngine] = {}
        self._http = httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=LOOK_DEADLINE_S)
        self.failover_s = failover_s
        for url in urls:
            self._add(url.rstrip("/").removesuffix("/v1"), "")

    def _add(self, url: str, pool: str) -> None:
        openai = AsyncOpenAI(base_url=f"{url}/v1", api_key=self._api_key, max_retries=0, timeout=CALL_DEADLINE_S)
        self._known[url] = ChatEngine(url, openai, pool)

    async def look(self) -> None:
        if self._hub is not None:
            try:
                listed = {e.url.rstrip("/"): e.engine_pool for e in await self._hub.list_engines() if e.routable}
            except MeshError:  # the hub may restart: those known so far go on
                listed = {url: engine.pool for url, engine in self._known.items()}
            for url in [url for url in self._known if url not in listed]:
                del self._known[url]
            for url in [url for url in listed if url not in self._known]:
                self._add(url, listed[url])
        await asyncio.gather(*(self._ask(engine) for engine in list(self._known.values())))

    async def look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def _ask(self, engine: ChatEngine) -> None:
        try:
            reply = await self._http.get(f"{engine.url}/version")
            said = reply.json()
            engine.version = said["version"] if isinstance(said["version"], int) else 0
            engine.logprobs_mode = said.get("logprobs_mode") or ""
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            engine.version = None

    def require(self, request: RolloutRequest, sampling: Sampling) -> None:
        """Raises MeshError when no engine can play the request now."""
        up = [e for e in self._known.values() if e.version is not None and request.engine_pool in ("", e.pool)]
        if up and not any(_meets(e.version, request) for e in up):
            newest = max(e.version or 0 for e in up)
            raise MeshError(
                Reason.VERSION_NOT_AVAILABLE, f"the newest version served is {newest}", retry_after_s=LOOK_EVERY_S
            )
        if not request.scores_only and _reshapes(sampling) and up and all(e.logprobs_mode != PROCESSED for e in up):
            raise MeshError(
                Reason.LOGPROBS_BIASED,
                "sampling changes the distribution (temperature, top_p, top_k, min_p), and no engine reports logprobs"
                " of what it sampled from; start the engines with --logprobs-mode processed_logprobs",
            )

    def select(self, request: RolloutRequest, skip: set[str]) -> ChatEngine | None:
        fitting = [
            e
            for e in self._known.values()
            if e.url not in skip and request.engine_pool in ("", e.pool) and _meets(e.version, request)
        ]
        return min(fitting, key=lambda engine: engine.in_flight, default=None)

    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        return tuple(
            EngineEndpoint(url=e.url, healthy=e.version is not None, version=e.version, in_flight=e.in_flight)
            for e in self._known.values()
        )

    async def close(self) -> None:
        await self._http.aclose()


def _meets(version: int | None, request: RolloutRequest) -> bool:
    if version is None:
        return False
    if request.exact_version is not None:
        return version == request.exact_version
    return request.min_version is None or version >= request.min_version


def _reshapes(sampling: Sampling) -> bool:
    return (
        sampling.temperature not in (None, 1.0)
        or sampling.top_p not in (None, 1.0)
        or (sampling.top_k or 0) > 0
        or (sampling.min_p or 0.0) > 0.0
    )


class PolicyClient(OpenAIChatCompletionsClient):
    """verifiers' client for one rollout: each call goes to the least loaded engine that may answer."""

    def __init__(self, engines: ChatEngines, request: RolloutRequest, seq_len: int) -> None:
        super().__init__(AsyncOpenAI(base_url="http://engine-pool.invalid/v1", api_key="EMPTY"))
        self._engines = engines
        self._request = request
        self._seq_len = seq_len
        self.calls = Calls()

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        args = {"logprobs": True, **sampling_args}
        extra = {**args.pop("extra_body", {}), "return_token_ids": True}
        give_up_at = time.monotonic() + self._engines.failover_s
        skip: set[str] = set()
        why = "no engine is reachable"
        while True:
            engine = self._engines.select(self._request, skip)
            if engine is None:
                if time.monotonic() >= give_up_at:
                    self.calls.failure = MeshError(
                        Reason.ENGINE_FAILED, f"no engine took the call within {self._engines.failover_s:g} s: {why}"
                    )
                    raise self.calls.failure
                await asyncio.sleep(LOOK_EVERY_S / 4)
                skip = set()
                continue
            before = engine.version or 0
            engine.in_flight += 1
            self._client = engine.openai  # read by the call below before it waits for anything
            try:
                answer = await super().get_native_response(
                    prompt, model, {**args, "extra_body": dict(extra)}, tools, **kwargs
                )
            except APIConnectionError as error:
                engine.version, why = None, f"{engine.url}: {error}"
                continue
            except APIStatusError as error:
                if error.status_code not in (429, 503) or time.monotonic() >= give_up_at:
                    if error.status_code >= 500:
                        self.calls.failure = MeshError(Reason.ENGINE_FAILED, f"{engine.url}: {error}")
                    raise
                skip.add(engine.url)
                why = f"{engine.url}: {error}"
                continue
            finally:
                engine.in_flight -= 1
            self._note(answer, engine.url, before)
            return answer

    def _note(self, answer, url: str, before: int) -> None:
        choice = answer.choices[0]
        told = choice.model_extra or {}
        ids = told.get("token_ids")
        if ids is None or getattr(answer, "prompt_token_ids", None) is None:
            self.calls.failure = MeshError(
                Reason.INVALID_REQUEST, f"{url} gives no token ids (return_token_ids) with /v1/chat/completions"
            )
            raise self.calls.failure
        named = told.get("version_spans") or [(0, len(ids), before)]
        spans = [(int(start), int(end), int(version or 0)) for start, end, version in named] if ids else []
        if not all(_meets(version, self._request) for _, _, version in spans):
            self.calls.failure = MeshError(
                Reason.VERSION_NOT_AVAILABLE, f"{url} sampled with version {min(span[2] for span in spans)}"
            )
            raise self.calls.failure
        self.calls.sampled[answer.id] = Sampled(spans, told.get("prompt_version"))
