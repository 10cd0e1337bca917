"""Turns the configuration of `rl` into the programs to start, each with its own complete configuration; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from meshrl.core.config import BaseConfig, ConfigError
from meshrl.core.config.shared import ServerConfig
from meshrl.core.credentials.secret import checked
from meshrl.inference.config import InferenceConfig
from meshrl.launch.config import RLConfig
from meshrl.launch.gpus import VARIABLE, Placement, place
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.rollout.config import ClientConfig, RolloutConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.weights.config import WeightsConfig

Config = TypeVar("Config", bound=BaseConfig)
Server = TypeVar("Server", RolloutConfig, TrainerConfig, WeightsConfig)

_KEYS_OF_THE_ROLLOUT_PROGRAM: Mapping[str, bool | set[str]] = {
    "client": True, "model": True, "services": True, "log": {"vf_level"}
}  # fmt: skip
"""Keys that rl takes in the orchestrator's section, at their older place."""

CLIENTS, ENGINES, HUB = 1, 2, 3
"""Stages of the end of a run: the orchestrator is stage 0, and each stage uses only later ones."""

RESTART_DEADLINE_S = 180.0
"""How long the others wait for a program that is started again: it imports torch and loads a model first. A trainer
may then look for its hub, and with `weight_broadcast.type` auto for a first engine, for its own `hub_deadline_s`."""

START_MARGIN_S = 60.0
"""What the orchestrator waits at the start beyond the trainer's `hub_deadline_s`, where its default is less."""

ENGINE_START_S = 300.0
"""How much longer it waits for a trainer that is started only after the engine on its GPU: vLLM compiles there."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program of a run."""

    name: str
    """Name of its log and configuration file."""

    module: str
    config: BaseConfig
    end_stage: int
    """Programs end stage by stage, clients before what they use."""

    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables beyond those of rl; they may hold a secret."""

    python: Path | None = None
    """Interpreter to run it with; None means that of rl."""

    restarts: int = 0

    after: tuple[str, ...] = ()
    """Names of the programs that must serve before it is started."""


def compose(
    config: RLConfig,
    free_port: Callable[[str], int],
    *,
    session: str = "",
    gpus: Sequence[str] = (),
    placement: Placement | None = None,
    engine_hosts: Sequence[str] | None = None,
) -> tuple[Part, ...]:
    """The programs of a run, servers first; `free_port(host)` gives a port for every server that has none.

    Addresses of programs that are started here replace those of the configuration; for a service that runs already, in
    orchestrator.services, there is no part, and the others get its address. `session` names this launch, so that a
    program that is started again knows that it goes on. `gpus` are those that may be used; over several nodes
    `placement` lists instead which program has which, and `engine_hosts` where each engine listens. Raises ConfigError
    when there are too few GPUs.
    """
    placement = placement or place(config, gpus)
    running = config.orchestrator.services
    weights = _with_port(_own_keys(WeightsConfig, config.weights, {"transport": True}), free_port)
    hub = running.weights or reach(weights.server)
    trainer = _trainer(config, hub, placement, free_port)
    engines = _engines(config, hub, placement, free_port, engine_hosts)
    engine_parts = _engine_parts(config, engines, placement)
    # Two that load a model onto one GPU at once take each other's room: vLLM counts what is free while it starts.
    shared = [part.name for number, part in enumerate(engine_parts) if placement.shared(number)]
    rollout = _with_port(_rollout(config, hub), free_port)
    taught = _teacher_rollout(config, rollout, free_port)
    addresses = {"trainer": reach(trainer.server), "weights": hub, **running.model_dump(exclude_none=True)}
    addresses["rollout"] = running.rollout_addresses(reach(rollout.server))
    waits = _deadlines(config, ENGINE_START_S if shared else 0.0)
    orchestrator = _orchestrator(config, addresses, waits, None if taught is None else reach(taught.server), session)
    engine_key = key_environ(config.inference, rollout.client.api_key_var)
    parts = (
        Part(
            name="weights",
            module="meshrl.weights.main",
            config=with_values(weights, _engines_of_the_hub(config, len(engines), rollout.client)),
            end_stage=HUB,
            environ=engine_key if config.running_engines else {},
            restarts=config.restarts,
        ),
        *engine_parts,
        Part(
            name="trainer",
            module="meshrl.trainer.main",
            config=trainer,
            end_stage=CLIENTS,
            environ=gpu_variables(placement.trainer),
            restarts=config.restarts_of("trainer"),
            after=tuple(shared),
        ),
        Part(
            name="rollout",
            module="meshrl.rollout.main",
            config=rollout,
            end_stage=CLIENTS,
            environ=engine_key,
            restarts=config.restarts,
        ),
        *(
            []
            if taught is None
            else [
                Part(
                    name="teacher",
                    module="meshrl.rollout.main",
                    config=taught,
                    end_stage=CLIENTS,
                    restarts=config.restarts,
                )
            ]
        ),
        Part(
            name="orchestrator",
            module="meshrl.orchestrator.main",
            config=orchestrator,
            end_stage=0,
            environ=engine_key if _scores_policy(config) else {},
            restarts=config.restarts_of("orchestrator"),
        ),
    )
    return tuple(part for part in parts if part.name not in running.replaced())


def _engines_of_the_hub(config: RLConfig, started: int, client: ClientConfig) -> dict[str, object]:
    """What the hub is told of the engines: those that run already, their key, and how many are `started` here."""
    values: dict[str, object] = {
        "engines": [*config.weights.engines, *config.running_engines],
        "engine_api_key_var": client.api_key_var,
        "engine_api_key_file": client.api_key_file,
    }
    if started and "min_engines" not in config.weights.model_fields_set:
        values["min_engines"] = started
    return values


def _trainer(config: RLConfig, hub: str, placement: Placement, free_port: Callable[[str], int]) -> TrainerConfig:
    """The trainer, which publishes to the hub in a way that its GPUs allow."""
    values: dict[str, object] = {"weight_broadcast.address": hub, **_transport(config, placement)}
    if config.inference is not None and config.inference.sleep_while_training:
        _check_sleep(config.inference, placement)
        values["release_memory"] = True
    return with_values(_with_port(config.trainer, free_port), values)


def _orchestrator(
    config: RLConfig, services: Mapping[str, object], deadlines: Mapping[str, object], teacher: str | None, session: str
) -> OrchestratorConfig:
    """The orchestrator, with the addresses of all `services` and of the rollout program in which a `teacher` plays."""
    values: dict[str, object] = {"services": services, **deadlines}
    if teacher is not None:
        values["teacher.rollout"] = [teacher]
    if session and not config.orchestrator.session:
        values["session"] = session
    if config.inference is not None and config.inference.sleep_while_training:
        values["sleep_engines"] = True
    ckpt = config.trainer.ckpt
    if ckpt is not None and not ckpt.weights_only and "trainer" not in config.orchestrator.services.given():
        values |= {"checkpoint_interval": ckpt.interval, "checkpoint_at_end": True}
    return with_values(_own_keys(OrchestratorConfig, config.orchestrator, _KEYS_OF_THE_ROLLOUT_PROGRAM), values)


def _teacher_rollout(config: RLConfig, rollout: RolloutConfig, free_port: Callable[[str], int]) -> RolloutConfig | None:
    """The rollout program in which the teacher plays; None where it plays nothing, or one runs already."""
    names, teacher = config.orchestrator.taught_environments, config.orchestrator.teacher
    if not names or teacher is None or teacher.rollout is not None:
        return None
    values: dict[str, object] = {
        "env": [entry.model_dump() for entry in rollout.env if entry.resolved_name in names],
        "client": {
            "api": "chat_completions",
            "base_url": teacher.client.base_url,
            "api_key_var": teacher.client.api_key_var,
            "call_deadline_s": teacher.client.call_deadline_s,
            "failover_s": teacher.client.failover_s,
        },
        "weights": None,
        "tokenizer": rollout.tokenizer or rollout.model.name,
        "model.name": teacher.model.name or rollout.model.name,
        "text_samples": True,
        "server.port": free_port(rollout.server.host),
        "output_dir": rollout.output_dir / "teacher",
    }
    return with_values(rollout, values)


def _scores_policy(config: RLConfig) -> bool:
    """Whether the orchestrator itself calls engines, which then want their key."""
    return any(config.orchestrator.algo_of(env).type in ("opsd", "custom") for env in config.orchestrator.train.env)


def _rollout(config: RLConfig, hub: str) -> RolloutConfig:
    """The rollout program, with the engines that the hub names: they come and go, and have the run's versions."""
    client = {**config.rollout.client.model_dump(), "base_url": []}
    if config.inference is not None and not {"api_key_var", "api_key_file"} & config.rollout.client.model_fields_set:
        client |= {"api_key_var": config.inference.api_key_var, "api_key_file": config.inference.api_key_file}
    env = [entry.model_dump() for entry in config.local_environments or config.rollout.env]
    return RolloutConfig.model_validate({**config.rollout.model_dump(), "client": client, "weights": hub, "env": env})


def _transport(config: RLConfig, placement: Placement) -> dict[str, object]:
    """What a GPU that trainer and engine share means for how versions travel: NCCL has no place for both on one."""
    if not any(placement.shared(number) for number in range(len(placement.engines))):
        return {}
    if config.trainer.weight_broadcast.type == "nccl":
        raise ConfigError(
            "weights.transport is 'nccl', but trainer and engine share a GPU, where NCCL has no place for both; use"
            " 'filesystem' or 'auto', or give them GPUs of their own"
        )
    return {"weight_broadcast.type": "filesystem"} if config.trainer.weight_broadcast.type == "auto" else {}


def _deadlines(config: RLConfig, trainer_held_s: float) -> dict[str, object]:
    """The orchestrator's waits, where it names none itself: the trainer may be held until an engine serves, and look
    for its hub before it answers, and where the others are started again, that may happen in the midst of the run."""
    given, hub_deadline_s = config.orchestrator.deadlines, config.trainer.hub_deadline_s
    values: dict[str, object] = {}
    if "startup_s" not in given.model_fields_set:
        values["deadlines.startup_s"] = max(given.startup_s, hub_deadline_s + START_MARGIN_S) + trainer_held_s
    if "unreachable_s" not in given.model_fields_set and (config.restarts or config.restarts_of("trainer")):
        values["deadlines.unreachable_s"] = RESTART_DEADLINE_S + hub_deadline_s
    return values


def _check_sleep(inference: InferenceConfig, placement: Placement) -> None:
    """Engines that sleep while the trainer trains do so for a trainer on the same GPU."""
    apart = [number for number in range(len(placement.engines)) if not placement.shared(number)]
    if apart and not inference.share_gpu:
        raise ConfigError(
            "inference.sleep_while_training gives memory to a trainer on the same GPU, but trainer and engine share"
            " none; list the same GPU in inference_gpu_ids and trainer_gpu_ids, set inference.share_gpu where they are"
            " placed in another way, or leave sleep_while_training out"
        )


def reach(server: ServerConfig) -> str:
    """The address at which a program on this machine reaches a server."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return ServerConfig(host=everywhere.get(server.host, server.host), port=server.port).address


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The configuration with some keys, named by their dotted path, set anew and everything validated again."""
    if not values:
        return config
    changed = config.model_dump()
    for path, value in values.items():
        *above, key = path.split(".")
        section = changed
        for name in above:
            section = section[name]
        section[key] = value
    return type(config).model_validate(changed)


def key_environ(inference: InferenceConfig | None, variable: str) -> dict[str, str]:
    """The engines' key, where the configuration holds it, in the variable that a program reads it from."""
    key = None if inference is None else inference.api_key
    return {} if key is None else {variable: checked(key.get_secret_value(), "inference.api_key")}


def gpu_variables(gpus: Sequence[str] | None) -> dict[str, str]:
    """The variable that shows a program only these GPUs."""
    return {} if gpus is None else {VARIABLE: ",".join(gpus)}


def _with_port(config: Server, free_port: Callable[[str], int]) -> Server:
    server = config.server
    return config if server.port else with_values(config, {"server.port": free_port(server.host)})


def _own_keys(program: type[Config], section: BaseConfig, others: Mapping[str, bool | set[str]]) -> Config:
    """A program's own configuration: the section of rl without the keys that only rl takes there."""
    return program.model_validate(section.model_dump(exclude=dict(others)))


def _engines(
    config: RLConfig,
    hub: str,
    placement: Placement,
    free_port: Callable[[str], int],
    hosts: Sequence[str] | None,
) -> list[InferenceConfig]:
    if config.inference is None:
        return []
    given = config.inference
    broadcast, lora = given.weight_broadcast or config.trainer.weight_broadcast, config.trainer.model.lora
    adapter_rank = lora.rank if lora is not None and config.trainer.weight_broadcast.lora_adapter_only else None
    engines = []
    hosts = hosts or [given.server.host] * config.engine_count
    for number, host in enumerate(hosts):
        port = given.server.port + hosts[:number].count(host) if given.server.port else free_port(host)
        values: dict[str, object] = {
            "server.host": host,
            "server.port": port,
            "weight_broadcast": {**broadcast.model_dump(), "address": hub},
            "share_gpu": given.share_gpu or placement.shared(number),
            "lora_rank": given.lora_rank or adapter_rank,
            "api_key": None,  # it comes through the environment: the configuration is written to a file
        }
        if (given.vllm_argument("data_parallel_size") or 1) > 1 and not given.vllm_argument("data_parallel_rpc_port"):
            # vLLM's own default is the same for all runs
            values["data_parallel_rpc_port"] = free_port(host)
        if config.engine_count > 1 and given.engine_id:
            values["engine_id"] = f"{given.engine_id}-{number + 1}"
        if number and given.seed is not None:
            values["seed"] = given.seed + number  # engines with one seed would sample the same replies to a prompt
        engines.append(with_values(given, values))
    return engines


def _engine_parts(config: RLConfig, engines: Sequence[InferenceConfig], placement: Placement) -> list[Part]:
    return [
        Part(
            name="inference" if number == 0 else f"inference_{number + 1}",
            module="meshrl.inference.main",
            config=engine,
            end_stage=ENGINES,
            environ=gpu_variables(placement.engines[number]) | key_environ(config.inference, engine.api_key_var),
            python=engine.python,
            restarts=config.restarts_of("inference"),
        )
        for number, engine in enumerate(engines)
    ]
