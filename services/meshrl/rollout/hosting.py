"""Loads environments and keeps them ready to play: one `HostedEnvironment` for each entry of the configuration."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from loguru import logger
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.configs.env import EnvConfig as VfEnvConfig
from verifiers.v1.env import Env
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.episode import Episode
from verifiers.v1.mcp import Toolset
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig as VfSampling
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    environment_class,
    harness_class,
    load_environment,
    resolve_env_config,
    taskset_class,
    taskset_config_type,
)
from verifiers.v1.utils.retries import run_episode_with_retry

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import EnvConfig
from meshrl.environments.harness import HarnessHost, InterceptionCalls, hosted_by
from meshrl.environments.missing import why_not_loaded
from meshrl.environments.plugins import plugin_id, split_choice
from meshrl.environments.tool_connections import ToolConnections
from meshrl.rollout import caches
from meshrl.rollout.engines.chat_servers import ChatServers
from meshrl.rollout.engines.model_client import EngineClient, EngineInterception
from meshrl.rollout.tasks import TaskSource
from meshrl.wire.types import EnvironmentInfo, Sampling

PolicyClient = EngineClient | ChatServers

NO_HARNESS_OF_ITS_OWN = "bash"
"""verifiers' harness for a taskset that brings none; ours takes its place."""

CHAT_LOOP = "null"
"""verifiers' chat loop, a program for each rollout. Ours takes its place where a role has it by default (as the user of
user-sim), not where the configuration names it."""

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
"""Sampling that verifiers gets. Stop tokens travel in the session: renderers bring their own."""


class EnvironmentOptionsError(ConfigError):
    """Wrong options of an environment; `keys` are those of its entry, such as ("args", "level")."""

    def __init__(self, message: str, *, keys: Sequence[tuple[str, ...]]) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class HostedEnvironment:
    def __init__(self, config: EnvConfig, env: Env, *, model: str, default_sampling: Sampling) -> None:
        self.name = config.resolved_name
        self.seq_len = config.seq_len
        self.env = env
        self.tasks = TaskSource(env.taskset, self.name)
        self._taskset_id = config.id
        self._model = model
        self._default_sampling = default_sampling
        self._package_version = _package_version(type(env.taskset).__module__)
        self._host: HarnessHost | None = None
        self._endpoint = TrainClientConfig(base_url="http://engine-pool.invalid/v1", api_key_var="MESHRL_API_KEY")

    @property
    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(
            name=self.name,
            taskset=self._taskset_id,
            num_tasks=self.tasks.num_tasks,
            agents=tuple(agent_config_fields(self.env.config)),
            default_sampling=self._default_sampling,
            package_version=self._package_version,
        )

    @asynccontextmanager
    async def serving(self, client: PolicyClient) -> AsyncIterator[None]:
        """Holds the environment's shared tools and interception server; the policy's calls go to `client`."""
        async with self.env.serving(), AsyncExitStack() as stack:
            # A server that is told whose call it answers has an address of its own for each rollout.
            shared = frozenset(server.url for server in self.env._shared_tools.values() if not server.state_secret)
            tools = ToolConnections(shared)
            stack.push_async_callback(tools.close)
            self._host = HarnessHost(InterceptionCalls(self.env._interception), tools, client.book.doing)
            if isinstance(client, ChatServers):  # a harness may then read a completion as it is made
                self._endpoint = EvalClientConfig(base_url="http://chat-servers.invalid/v1", api_key_var="")
            # The one reach into verifiers: 0.4 takes no interception of one's own. A contract test guards it.
            self.env._interception = EngineInterception(self.env._interception, client, self._endpoint)
            yield

    def sampling(self, override: Sampling, index: int) -> Sampling:
        """Sampling of rollout `index` of a group: the request over the environment's defaults, with a seed of its
        own."""
        merged = override.over(self._default_sampling)
        return merged if merged.seed is None else replace(merged, seed=merged.seed + index)

    async def play(self, task: Task, sampling: Sampling, on_trace: Callable[[Trace], None]) -> Episode:
        set_values = {name: value for name in SAMPLING_KEYS if (value := getattr(sampling, name)) is not None}
        context = ModelContext(model=self._model, client=self._endpoint, sampling=VfSampling(**set_values))
        assert self._host is not None  # it is served
        with hosted_by(self._host):
            return await run_episode_with_retry(
                lambda: self.env.run_episode(task, context, on_trace=on_trace), self.env.config.retries
            )


def load(
    config: EnvConfig, *, model: str, harness: str, max_turns: int | None, default_sampling: Sampling
) -> HostedEnvironment:
    """Blocks. Raises ConfigError for a missing environment, wrong options, or a failure of its own code."""
    name = config.resolved_name
    caches.install()
    resolved = configured(config, harness=harness, max_turns=max_turns)
    try:
        env = load_environment(resolved)
        hosted = HostedEnvironment(config, env, model=model, default_sampling=default_sampling)
        hosted.tasks.load()
        servers = tool_servers(env)
    except Exception as error:  # code of the taskset's own may raise anything; one sentence names the environment
        logger.opt(exception=error).debug("environment {} cannot be loaded", name)
        raise ConfigError(
            f"environment {name!r}: taskset {config.id!r} cannot load its tasks: {type(error).__name__}: {error};"
            " correct its args or what it reads (--log.level debug shows where it failed)"
        ) from error
    if hosted.tasks.num_tasks == 0:
        raise ConfigError(f"environment {name!r}: {config.id!r} has no tasks; check its args")
    for server in servers:
        if not can_be_started(server):
            module, cls = type(server).__module__, type(server).__name__
            raise ConfigError(
                f"environment {name!r}: tool server {cls} is started as `python -m {module}`, which does nothing; end"
                f' that module with: if __name__ == "__main__": {cls}.run()'
            )
    return hosted


def tool_servers(env: Env) -> list[Toolset]:
    """Those shared by the tasks, then those of a task."""
    taskset = env.taskset
    return [*taskset.toolsets(taskset.config), *type(taskset).task_type().toolsets(taskset.config.task)]


def can_be_started(server: Toolset) -> bool:
    """False for a tool server whose module runs nothing; one that runs elsewhere (`url`) needs no start."""
    if server.config.url is not None or server.config.runtime.type != "subprocess":
        return True
    try:
        return "__main__" in inspect.getsource(sys.modules[type(server).__module__])
    except (KeyError, OSError, TypeError):  # no source to read
        return True


def configured(config: EnvConfig, *, harness: str, max_turns: int | None) -> VfEnvConfig:
    """verifiers' configuration of an environment; imports the taskset, and reads none of its data. Raises
    EnvironmentOptionsError for wrong options, and ConfigError when it cannot be found."""
    name = config.resolved_name
    try:
        return resolve_env_config(env_block(config, harness=harness, max_turns=max_turns))
    except ValidationError as error:
        details = [_option_problem(config.id, problem) for problem in error.errors()]
        raise EnvironmentOptionsError(
            f"environment {name!r}: its args do not fit {config.id!r}: {'; '.join(text for _, text in details)}",
            keys=[key for key, _ in details],
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = why_not_loaded(config.id.rpartition("+")[2], error)
        raise ConfigError(f"environment {name!r}: {config.id!r} cannot be loaded: {why}") from error
    except Exception as error:  # the taskset's module is imported here, and may raise anything
        raise ConfigError(
            f"environment {name!r}: {config.id!r} cannot be loaded: its import failed with"
            f" {type(error).__name__}: {error}"
        ) from error


def why_unrewarded(name: str, config: VfEnvConfig) -> str | None:
    """None where something may give a reward: a method, an option, or code of the task's or environment's own."""
    task, options = taskset_class(config.taskset.id).task_type(), config.taskset.task
    own = (
        environment_class(config.taskset.id, config.id) is not SingleAgentEnv,
        task.score is not Task.score,
        task.finalize is not Task.finalize,
    )
    marked = any(hasattr(method, "reward") for parent in task.__mro__ for method in vars(parent).values())
    if any(own) or marked or options.rewards or options.judges:
        return None
    return (
        f"environment {name!r}: nothing rewards a rollout of {config.taskset.id!r}, so every reward is 0; decorate a"
        f" method of {task.__name__} with @vf.reward, or set args.task.judges"
    )


def _option_problem(taskset: str, problem: ErrorDetails) -> tuple[tuple[str, ...], str]:
    inner = [str(part) for part in problem["loc"]]
    key = ("args", *(inner[1:] if inner[0] == "taskset" else inner))  # options of both stand side by side in args
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        text = "there is no such option"
        if len(key) == 2:
            module_id = plugin_id(split_choice(taskset.rpartition("+")[2])[0])
            known = [option for option in taskset_config_type(module_id).model_fields if option != "id"]
            close = difflib.get_close_matches(key[1], known, n=1)
            text += f", did you mean {close[0]}?" if close else f" (options are {', '.join(known)})"
    return key, f"{'.'.join(key)}: {text}"


def env_block(config: EnvConfig, *, harness: str, max_turns: int | None) -> dict[str, object]:
    """verifiers' `[env]` block for one entry. `id` is a taskset, `environment+taskset` for another environment around
    it, or a registered family with a choice (`reasoning_gym:leg_counting`). In `args`, names of agents and of
    environment options (timeout, retries, ...) go to the environment, all others to the taskset."""
    env_id, _, taskset_id = config.id.rpartition("+")
    taskset_id, choice = split_choice(taskset_id)
    taskset_id = plugin_id(taskset_id)
    env_id = plugin_id(env_id) if env_id else ""
    config_cls = env_config_type(taskset_id, env_id)
    environment_keys = set(config_cls.model_fields) - {"id", "taskset"}
    block: dict[str, Any] = {key: value for key, value in config.args.items() if key in environment_keys}
    taskset = {key: value for key, value in config.args.items() if key not in environment_keys}
    block.update(id=env_id, taskset={**taskset, **choice, "id": taskset_id})
    task_needs_container = taskset_class(taskset_id).task_type().NEEDS_CONTAINER
    has_harness = default_harness_id(taskset_id) != NO_HARNESS_OF_ITS_OWN
    local = True
    for role, spec in agent_config_fields_of(config_cls).items():
        agent = dict(block.get(role) or {})
        if max_turns is not None and spec.max_turns is None:
            agent.setdefault("max_turns", max_turns)
        if "harness" in agent:
            agent["harness"] = {**agent["harness"], "id": plugin_id(agent["harness"]["id"])}
        elif spec.harness.id == CHAT_LOOP if spec.harness is not None else not has_harness:
            agent["harness"] = {"id": plugin_id(harness)}
        if "runtime" not in agent and "runtime" not in spec.model_fields_set and not task_needs_container:
            pinned = (agent.get("harness") or {}).get("id") or (spec.harness.id if spec.harness else taskset_id)
            if not harness_class(pinned).NEEDS_CONTAINER:
                agent["runtime"] = {"type": "subprocess"}
        local = local and (agent.get("runtime") or {}).get("type") == "subprocess"
        block[role] = agent
    if local:
        block.setdefault("interception", {"type": "server"})
    return block


def agent_config_fields_of(config_cls: type[VfEnvConfig]) -> dict[str, AgentConfig]:
    return {
        name: field.default for name, field in config_cls.model_fields.items() if isinstance(field.default, AgentConfig)
    }


@cache
def _distributions() -> Mapping[str, list[str]]:
    """By module; kept, since the look takes a third of a second."""
    return packages_distributions()


def _package_version(module: str) -> str:
    names = _distributions().get(module.partition(".")[0], [])
    try:
        return version(names[0]) if names else ""
    except PackageNotFoundError:
        return ""
