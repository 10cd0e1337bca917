"""Gets the scores (logprobs under a teacher or the live policy) that algorithms need of rollouts, and caches them.

The dispatcher has each group scored when it is over; the loop asks for what is missing when it makes the batch. A
teacher's scores are cached by the tokens alone, those of the live policy by rollout too, since the policy changes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from meshrl.algorithms.recipes.base import Actor, Recipe, ScoreRequest, Scores, TokenScores
from meshrl.client import WeightSyncClient
from meshrl.core.credentials.secret import read_secret
from meshrl.core.token_cache import TokenCache
from meshrl.orchestrator.config import TeacherConfig
from meshrl.sampling.retry import RunError
from meshrl.wire.types import Rollout

if TYPE_CHECKING:
    from meshrl.orchestrator.teachers.logprob_servers import LogprobServers


class RolloutScorer:
    """Scores groups at the `servers` of their environment's algorithm, if any."""

    def __init__(
        self, recipes: Mapping[str, Recipe], servers: Mapping[str, LogprobServers], *, cache_tokens: int
    ) -> None:
        self._recipes = recipes
        self._servers = servers
        self._caches = {server: TokenCache[bytes, TokenScores](cache_tokens) for server in servers.values()}

    async def check(self) -> None:
        """Raises RunError when a model that is to score cannot."""
        for server in self._caches:
            asked = [self._recipes[name].top_k for name, one in self._servers.items() if one is server]
            await server.check(top_k=max(asked))

    async def close(self) -> None:
        for server in self._caches:
            await server.close()

    async def score(self, groups: Iterable[Sequence[Rollout]]) -> Scores:
        """Raises RunError when a server fails."""
        wanted: list[tuple[ScoreRequest, str]] = []
        for group in groups:
            if group and (environment := group[0].environment) in self._servers:
                wanted += [(one, environment) for one in self._recipes[environment].score_requests(group)]
        found = await asyncio.gather(*(self._score_one(request, environment) for request, environment in wanted))
        return {(request.rollout_id, request.place): scores for (request, _), scores in zip(wanted, found, strict=True)}

    async def _score_one(self, request: ScoreRequest, environment: str) -> TokenScores:
        top_k = self._recipes[environment].top_k
        server = self._servers[environment]
        cache = self._caches[server]
        digest = blake3(np.ascontiguousarray(request.token_ids, "<i4").tobytes())
        digest.update(top_k.to_bytes(4, "little"))
        if self._recipes[environment].scored_by is Actor.POLICY:
            digest.update(request.rollout_id.encode())
        key = digest.digest()
        if (known := cache.get(key)) is None:
            known = await server.score(request.token_ids, top_k=top_k)
            cache.put(key, known, len(known.logprobs))
        own = slice(request.context, None)
        return TokenScores(
            logprobs=known.logprobs[own],
            top_ids=None if known.top_ids is None else known.top_ids[own],
            top_logprobs=None if known.top_logprobs is None else known.top_logprobs[own],
        )


def build_scorer(
    recipes: Mapping[str, Recipe],
    configured: Mapping[str, TeacherConfig | None],
    hub: WeightSyncClient,
    *,
    engine_pool: str,
) -> RolloutScorer:
    """Algorithms and teachers are by environment. Raises RunError for an algorithm without its teacher, and without
    aiohttp."""
    teachers: dict[str, LogprobServers] = {}
    servers: dict[str, LogprobServers] = {}
    for name, teacher in configured.items():
        scored_by = recipes[name].scored_by
        if scored_by is None:
            continue
        if scored_by is Actor.TEACHER and teacher is None:
            raise RunError(f"the algorithm of environment {name!r} wants a teacher's scores; set orchestrator.teacher")
        chosen = teacher if scored_by is Actor.TEACHER and teacher is not None else TeacherConfig()
        key = f"{scored_by.value} {chosen.model_dump_json()}"
        if key not in teachers:
            teachers[key] = _connect(scored_by, chosen, hub, engine_pool)
        servers[name] = teachers[key]
    cache_tokens = max((teacher.cache_tokens for teacher in configured.values() if teacher), default=4_000_000)
    return RolloutScorer(recipes, servers, cache_tokens=cache_tokens)


def _connect(scored_by: Actor, teacher: TeacherConfig, hub: WeightSyncClient, engine_pool: str) -> LogprobServers:
    try:
        from meshrl.orchestrator.teachers.logprob_servers import LogprobServers
    except ModuleNotFoundError as error:
        raise RunError(f"scores of other models need {error.name}: pip install 'meshrl[rollout]'") from error
    api_key = read_secret(
        "orchestrator.teacher.client.api_key", None, file=None, variable=teacher.client.api_key_var, environ=os.environ
    )
    if scored_by is Actor.TEACHER:
        who = f"the teacher {teacher.model.name or ''} at {' and '.join(teacher.client.base_url)}".replace("  ", " ")

        async def configured() -> Sequence[str]:
            return teacher.client.base_url

        return LogprobServers(who, configured, config=teacher, api_key=api_key)

    async def engines() -> Sequence[str]:
        return [engine.url for engine in await hub.list_engines(engine_pool) if engine.routable]

    return LogprobServers("the policy's engines", engines, config=teacher, api_key=api_key)
