"""Asks engines for the logprobs of given tokens: POST /inference/v1/generate with prompt_logprobs, as vLLM has it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp
import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.recipes.base import TokenScores
from meshrl.client.backoff import Backoff
from meshrl.core.rpc.blocking_http import error_text
from meshrl.core.rpc.engine_http import NO_ANSWER, ask, engine_session
from meshrl.orchestrator.config import TeacherConfig
from meshrl.sampling.retry import RunError
from meshrl.wire.errors import MeshError

AGAIN = frozenset({200, 408, 409, 425, 429, 500, 502, 503, 504})  # 200 without JSON
PAUSE_S = (0.1, 5.0)
SCORE_PATH, MODELS_PATH = "/inference/v1/generate", "/v1/models"
NEEDS = (
    "it must be an engine that gives prompt logprobs: vLLM with /inference/v1/generate, or `inference`; a server of"
    " /v1/chat/completions alone can only teach by training_mode 'sft'"
)


class LogprobServers:
    """Servers of one model. `urls` gives them anew for each call, since engines of the policy come and go."""

    def __init__(
        self, who: str, urls: Callable[[], Awaitable[Sequence[str]]], *, config: TeacherConfig, api_key: str | None
    ) -> None:
        self._who, self._urls, self._model, self._api_key = who, urls, config.model.name, api_key
        self._failover_s = config.client.failover_s
        self._timeout = aiohttp.ClientTimeout(
            total=config.client.call_deadline_s, sock_connect=min(10.0, config.client.call_deadline_s)
        )
        self._http: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.max_inflight)
        self._turn = itertools.count()
        self._longest: int | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def check(self, *, top_k: int = 0) -> None:
        """Raises RunError when the model cannot score two tokens."""
        await self.score(np.zeros(2, dtype=np.int32), top_k=top_k)

    async def score(self, token_ids: NDArray[np.int32], *, top_k: int = 0) -> TokenScores:
        """The logprob of each token after those before it, and of the `top_k` likeliest in its place; none for the
        first, and beyond the model's length. A call that fails in passing is repeated, at the next server. Raises
        RunError when none answers in `failover_s`, or one cannot do it."""
        found = TokenScores(
            logprobs=np.full(len(token_ids), np.nan, dtype=np.float32),
            top_ids=np.full((len(token_ids), top_k), -1, dtype=np.int32) if top_k else None,
            top_logprobs=np.zeros((len(token_ids), top_k), dtype=np.float32) if top_k else None,
        )
        async with self._slots:
            if self._longest is None:
                models = await self._ask("GET", MODELS_PATH, None)
                listed = models.get("data") if isinstance(models, dict) else None
                said = listed[0].get("max_model_len") if listed and isinstance(listed[0], dict) else None
                self._longest = int(said) if said else 2**31
            asked = token_ids[: self._longest - 1].tolist()  # one is left for the token that engines must sample
            if len(asked) < 2:
                return found
            sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": max(top_k, 1)}
            body: dict[str, object] = {"token_ids": asked, "sampling_params": sampling}
            if self._model:
                body["model"] = self._model
            answer = await self._ask("POST", SCORE_PATH, body)
        try:
            entries = answer["prompt_logprobs"]  # type: ignore[index]  # told as an error just below
            for place, (token, entry) in enumerate(zip(asked[1:], entries[1:], strict=True), 1):
                found.logprobs[place] = entry[str(token)]["logprob"]
                if found.top_ids is not None and found.top_logprobs is not None:
                    ids, logprobs = likeliest(entry, top_k)
                    found.top_ids[place, : len(ids)], found.top_logprobs[place, : len(ids)] = ids, logprobs
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{self._who} gave no prompt_logprobs for {len(asked)} tokens ({error!r}): {NEEDS}"
            ) from error
        if top_k > 1 and found.top_ids is not None and (found.top_ids[1 : len(asked), 1] < 0).any():
            raise RunError(
                f"{self._who} gave fewer than the {top_k} likeliest tokens that algo.top_k asks for: {NEEDS}"
            )
        return found

    async def _ask(self, method: str, path: str, body: object) -> object:
        if self._http is None:
            self._http = engine_session(self._api_key, limit=0, timeout=self._timeout)  # `_slots` bounds the calls
        give_up_at, backoff = time.monotonic() + self._failover_s, Backoff(*PAUSE_S)
        while True:
            try:
                urls, why = await self._urls(), "it has no engine"
            except MeshError as error:  # the hub, which lists the policy's engines
                urls, why = (), str(error)
            if urls:
                url = urls[next(self._turn) % len(urls)].rstrip("/").removesuffix("/v1")
                try:
                    status, answer = await ask(self._http, method, url + path, body=body)
                    if status == 200 and not isinstance(answer, str):
                        return answer
                    why = f"{url}{path} answered {status}: {error_text(answer)}"
                    if status not in AGAIN:
                        raise RunError(f"{self._who} cannot score tokens: {why}; {NEEDS}")
                except NO_ANSWER as error:
                    why = f"{url} does not answer ({type(error).__name__}: {error})"
            if time.monotonic() >= give_up_at:
                raise RunError(f"{self._who} scored nothing for {self._failover_s:g} s: {why}; is it running?")
            await asyncio.sleep(backoff.next_s())


def likeliest(entry: Mapping[str, Mapping[str, float]], top_k: int) -> tuple[list[int], list[float]]:
    """Ids and logprobs of at most `top_k` tokens of one place, likeliest first. The answer may have the actual token
    beyond these."""
    ranked = sorted(((said["logprob"], int(token)) for token, said in entry.items()), reverse=True)[:top_k]
    return [token for _, token in ranked], [logprob for logprob, _ in ranked]
