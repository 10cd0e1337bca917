"""Connects to the models that score rollouts: teachers at their configured URLs, the policy at the hub's engines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshrl.algorithms.recipes.base import Actor, Recipe
from meshrl.client import WeightSyncClient
from meshrl.core.credentials.secret import read_secret
from meshrl.orchestrator.config import OrchestratorConfig, TeacherConfig
from meshrl.orchestrator.teachers.scorer import GroupScorer
from meshrl.sampling.retry import RunError

if TYPE_CHECKING:
    from meshrl.orchestrator.teachers.logprob_servers import LogprobServers


def build_scorer(config: OrchestratorConfig, recipes: Mapping[str, Recipe], hub: WeightSyncClient) -> GroupScorer:
    """The scorer of a run, whose algorithms are `recipes`, by environment; nothing is dialled yet.

    Raises RunError for an algorithm whose teacher is not configured, and where aiohttp is not installed.
    """
    teachers: dict[str, LogprobServers] = {}
    servers: dict[str, LogprobServers] = {}
    for env in config.train.env:
        name = env.resolved_name
        scored_by, teacher = recipes[name].scored_by, config.teacher_of(env)
        if scored_by is None:
            continue
        if scored_by is Actor.TEACHER and teacher is None:
            raise RunError(f"the algorithm of environment {name!r} wants a teacher's scores; set orchestrator.teacher")
        chosen = teacher if scored_by is Actor.TEACHER and teacher is not None else TeacherConfig()
        key = f"{scored_by.value} {chosen.model_dump_json()}"
        if key not in teachers:
            teachers[key] = _connect(scored_by, chosen, hub, config.engine_pool)
        servers[name] = teachers[key]
    cache_tokens = max(
        (teacher.cache_tokens for env in config.train.env if (teacher := config.teacher_of(env))), default=4_000_000
    )
    return GroupScorer(recipes, servers, cache_tokens=cache_tokens)


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
