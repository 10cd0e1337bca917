"""Loads old environments and plays their rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import verifiers as vf

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutRequest, Sampling
from meshrl_verifiers_v0.config import OldEnv
from meshrl_verifiers_v0.engines import ChatEngines, PolicyClient
from meshrl_verifiers_v0.samples import rollout_of

Row = dict[str, Any]


class HostedOldEnv:
    def __init__(self, config: OldEnv, env: vf.Environment, engines: ChatEngines, model: str, seq_len: int) -> None:
        self.name = config.resolved_name
        self.engines = engines
        self._env = env
        self._model = model
        self._seq_len = seq_len
        self._rows = env.get_eval_dataset() if config.split == "eval" else env.get_dataset()
        self._defaults = config.sampling.to_wire()
        self._module = config.id
        env.set_max_seq_len(seq_len)
        env.set_score_rollouts(True)

    @property
    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(
            name=self.name,
            taskset=self._module,
            num_tasks=len(self._rows),
            agents=("agent",),
            default_sampling=self._defaults,
            package_version=_package_version(self._module),
        )

    @property
    def scores_groups(self) -> bool:
        """Rewards compare the rollouts of a group, so they come all at once."""
        return bool(self._env.requires_group_rollouts)

    def row(self, request: RolloutRequest) -> Row:
        """Raises MeshError UNKNOWN_TASK or INVALID_REQUEST."""
        if request.task_payload is not None:
            return _row_of_payload(request.task_payload)
        index = request.task_index or 0
        if index >= len(self._rows):
            raise MeshError(Reason.UNKNOWN_TASK, f"{self.name} has {len(self._rows)} tasks, there is no task {index}")
        return dict(self._rows[index])

    def sampling(self, request: RolloutRequest) -> Sampling:
        return request.sampling.over(self._defaults)

    async def play(self, row: Row, request: RolloutRequest, index: int) -> Rollout:
        """Rollout `index`, scored by itself. Raises MeshError."""
        state, client = await self._run(row, request, index)
        if client.calls.failure is not None:
            raise client.calls.failure
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return self._rollout(state, client, row, request)

    async def play_group(self, row: Row, request: RolloutRequest) -> AsyncIterator[Rollout | MeshError]:
        """All rollouts, scored together; a MeshError in place of each that failed."""
        runs = (self._run(row, request, index) for index in range(request.group_size))
        played = await asyncio.gather(*runs, return_exceptions=True)
        ended = [one for one in played if not isinstance(one, BaseException)]
        if whole := [state for state, client in ended if client.calls.failure is None]:
            await self._env.rubric.score_group(whole)
        for state, _ in ended:
            await self._env.rubric.cleanup(state)
        for one in played:
            try:
                if isinstance(one, BaseException):
                    raise as_mesh_error(one)
                yield self._rollout(one[0], one[1], row, request)
            except MeshError as error:
                yield error

    async def _run(self, row: Row, request: RolloutRequest, index: int) -> tuple[vf.State, PolicyClient]:
        client = PolicyClient(self.engines, request, self._seq_len)
        args = sampling_args(self.sampling(request), index)
        return await self._env.rollout(dict(row), client, self._model, args), client

    def _rollout(self, state: vf.State, client: PolicyClient, row: Row, request: RolloutRequest) -> Rollout:
        temperature = self.sampling(request).temperature
        return rollout_of(
            state, client.calls, request, key=_key(row), temperature=1.0 if temperature is None else temperature
        )


def load(config: OldEnv) -> vf.Environment:
    """Imports and builds an environment, with its data. Raises SystemExit with one message."""
    try:
        env = vf.load_environment(config.id, **config.args)
        _ = env.get_eval_dataset() if config.split == "eval" else env.get_dataset()
    except Exception as error:  # the environment's own code may raise anything
        raise SystemExit(
            f"meshrl-verifiers-v0: environment {config.id!r} cannot be loaded: {type(error).__name__}: {error};"
            f" install it here (prime env install OWNER/{config.id}, or uv pip install -e path/to/{config.id}), put its"
            " folder on PYTHONPATH, or correct its args"
        ) from error
    return env


def sampling_args(sampling: Sampling, index: int) -> dict[str, Any]:
    """For the chat API. An engine's own defaults would change the distribution unseen."""
    extra: dict[str, Any] = {"top_k": sampling.top_k or 0, "min_p": sampling.min_p or 0.0}
    if sampling.max_tokens is not None:
        extra["max_tokens"] = sampling.max_tokens
    if sampling.stop_token_ids:
        extra["stop_token_ids"] = list(sampling.stop_token_ids)
    args: dict[str, Any] = {
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "extra_body": extra,
    }
    if sampling.seed is not None:
        args["seed"] = (sampling.seed + index) % 2**63
    return args


def as_mesh_error(error: BaseException) -> MeshError:
    if isinstance(error, MeshError):
        return error
    return MeshError(Reason.ENVIRONMENT_FAILED, f"{type(error).__name__}: {error}")


def _row_of_payload(payload: str) -> Row:
    try:
        row = json.loads(payload)
        prompt = row["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise MeshError(
            Reason.INVALID_REQUEST, f"task_payload must be a JSON object with a prompt (text or messages): {error}"
        ) from error
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"example_id": 0, **row, "prompt": messages}


def _key(row: Row) -> str:
    parts = {name: row.get(name) for name in ("prompt", "answer", "info")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _package_version(module: str) -> str:
    try:
        return version(module.rpartition("/")[2])
    except PackageNotFoundError:
        return ""
