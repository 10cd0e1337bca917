"""Turns the configuration of `rl` into the programs to start; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import SecretStr

from meshrl.core.config import BaseConfig, ConfigError
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.core.credentials.secret import checked
from meshrl.core.paths import Layout
from meshrl.core.torch_environment import VISIBLE_GPUS
from meshrl.launch.config import RLConfig
from meshrl.launch.config.sections import RunSection
from meshrl.launch.gpus import Placement, place
from meshrl.orchestrator.config import DeadlinesConfig, OrchestratorConfig, TeacherConfig
from meshrl.rollout.config import ClientConfig, RolloutConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.weights.config import WeightsConfig

Config = TypeVar("Config", bound=BaseConfig)
Server = TypeVar("Server", RolloutConfig, TrainerConfig, WeightsConfig)

NOT_THE_ORCHESTRATORS: Mapping[str, bool | set[str]] = {
    "client": True, "model": True, "services": True, "log": {"vf_level"}
}  # fmt: skip
"""Keys of its section: those of the rollout program, at their older place, and services that run already."""

CLIENTS, ENGINES, HUB = 1, 2, 3
"""Stages of the end of a run, after orchestrators (0); each uses only later ones."""

MOST_LORAS = 16  # that vLLM reserves memory for, unless more are asked for
RESTART_DEADLINE_S = 180.0
"""The others' wait for a restarted program, which imports torch and loads a model first."""

START_MARGIN_S = 60.0
"""The orchestrator's wait at the start beyond the trainer's `hub_deadline_s`."""

ENGINE_START_S = 300.0
"""More of it for a trainer that starts only after the engine on its GPU."""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    module: str
    config: BaseConfig
    end_stage: int

    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Beyond the variables of rl. They may hold a secret."""

    python: Path | None = None
    """None: the interpreter of rl."""

    run_id: str = ""
    """Of an orchestrator, if not the trainer's own run."""

    restarts: int = 0

    after: tuple[str, ...] = ()
    """Programs that must serve before it is started."""

    @property
    def kind(self) -> str:
        """Its name without number or run: inference of inference_2."""
        return self.name.partition("_")[0]


def compose(
    config: RLConfig,
    free_port: Callable[[str], int],
    *,
    session: str = "",
    gpus: Sequence[str] = (),
    placement: Placement | None = None,
) -> tuple[Part, ...]:
    """The programs of a run, servers first; `free_port(host)` gives a port for every server that has none.

    A service in orchestrator.services has no part, and the others get its address. `session` names this launch, by
    which a restarted program goes on. Over several nodes `placement` replaces `gpus`. Raises ConfigError when there are
    too few GPUs.
    """
    running = config.orchestrator.services
    weights = _with_port(own_keys(WeightsConfig, config.weights, {"transport": True}), free_port)
    run = _Composition(
        config=config,
        free_port=free_port,
        placement=placement or place(config.gpu_demand, gpus),
        hub=running.weights or weights.server.local_address,
        session=session,
    )
    trainer = run.trainer()
    engines = run.engines()
    # Two that load a model onto one GPU at once take each other's room: vLLM counts what is free while it starts.
    shared = [part.name for number, part in enumerate(engines) if run.placement.shared(number)]
    rollout = run.rollout
    addresses = {
        "trainer": trainer.server.local_address,
        "weights": run.hub,
        **running.model_dump(exclude_none=True),
    }
    addresses["rollout"] = running.rollout_addresses(rollout.server.local_address)
    given_key = None if config.inference is None else config.inference.api_key
    engine_key = key_environ(given_key, rollout.client.api_key_var)
    teachers: list[Part] = []
    orchestrators: list[Part] = []
    for section in config.orchestrators.values():
        run_id = section.run_id if isinstance(section, RunSection) else ""
        of_run = f"_{run_id}" if run_id else ""
        name = f"teacher{of_run}"
        taught = run.teacher_rollout(name, section.teacher, section.taught_environments)
        if taught is not None:
            teacher = Part(
                name=name, module="meshrl.rollout.main", config=taught, end_stage=CLIENTS, restarts=config.restarts
            )
            teachers.append(teacher)
        plays_at = None if taught is None else taught.server.local_address
        orchestrator = run.orchestrator(section, addresses, plays_at, ENGINE_START_S if shared else 0.0)
        scores = any(algo.type in ("opsd", "custom") for algo in orchestrator.algos.values())
        orchestrators.append(
            Part(
                name=f"orchestrator{of_run}",
                module="meshrl.orchestrator.main",
                config=orchestrator,
                end_stage=0,
                run_id=run_id,
                environ=engine_key if scores else {},  # it calls engines itself
                restarts=config.restarts_of("orchestrator"),
            )
        )
    parts = [
        Part(
            name="weights",
            module="meshrl.weights.main",
            config=with_values(weights, run.engines_of_the_hub(len(engines), rollout.client)),
            end_stage=HUB,
            environ=engine_key if config.running_engines else {},
            restarts=config.restarts,
        ),
        *engines,
        Part(
            name="trainer",
            module="meshrl.trainer.main",
            config=trainer,
            end_stage=CLIENTS,
            environ=gpu_variables(run.placement.trainer),
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
        *teachers,
        *orchestrators,
    ]
    return tuple(part for part in parts if part.name not in running.replaced())


@dataclass(frozen=True, kw_only=True)
class _Composition:
    config: RLConfig
    free_port: Callable[[str], int]
    placement: Placement
    hub: str
    """Address of the weight hub."""
    session: str

    def engines_of_the_hub(self, started: int, client: ClientConfig) -> dict[str, object]:
        values: dict[str, object] = {
            "engines": [*self.config.weights.engines, *self.config.running_engines],
            "engine_api_key_var": client.api_key_var,
            "engine_api_key_file": client.api_key_file,
        }
        if started and "min_engines" not in self.config.weights.model_fields_set:
            values["min_engines"] = started
        return values

    def trainer(self) -> TrainerConfig:
        config, inference = self.config, self.config.inference
        engines_apart = [number for number in range(len(self.placement.engines)) if not self.placement.shared(number)]
        values: dict[str, object] = {"weight_broadcast.address": self.hub}
        if len(engines_apart) < len(self.placement.engines):
            if config.trainer.weight_broadcast.type == "nccl":
                raise ConfigError(
                    "weights.transport is 'nccl', but trainer and engine share a GPU, where NCCL has no place for both;"
                    " use 'filesystem' or 'auto', or give them GPUs of their own"
                )
            if config.trainer.weight_broadcast.type == "auto":
                files = WeightBroadcastConfig(type="filesystem")  # without the keys of nccl, which auto allows
                values |= {f"weight_broadcast.{key}": getattr(files, key) for key in ("type", "bucket_mib", "host")}
        if inference is not None and inference.sleep_while_training:
            if engines_apart and not inference.share_gpu:
                raise ConfigError(
                    "inference.sleep_while_training gives memory to a trainer on the same GPU, but trainer and engine"
                    " share none; list the same GPU in inference_gpu_ids and trainer_gpu_ids, set inference.share_gpu"
                    " where they are placed in another way, or leave sleep_while_training out"
                )
            values["release_memory"] = True
        return with_values(_with_port(config.trainer, self.free_port), values)

    def orchestrator(
        self,
        section: OrchestratorConfig,
        addresses: Mapping[str, object],
        teacher_plays_at: str | None,
        trainer_held_s: float,
    ) -> OrchestratorConfig:
        config, ckpt = self.config, self.config.trainer.ckpt
        values: dict[str, object] = {"services": addresses, **self.deadlines(section.deadlines, trainer_held_s)}
        if teacher_plays_at is not None:
            values["teacher.rollout"] = [teacher_plays_at]
        if self.session and not section.session:
            values["session"] = self.session
        if isinstance(section, RunSection) and section.output_dir == config.output_dir:
            values["output_dir"] = Layout(config.output_dir).run_folder(section.run_id)
        if config.inference is not None and config.inference.sleep_while_training:
            values["sleep_engines"] = True
        if ckpt is not None and not ckpt.weights_only and config.starts("trainer"):
            values |= {"checkpoint_interval": ckpt.interval, "checkpoint_at_end": True}
        return with_values(own_keys(OrchestratorConfig, section, NOT_THE_ORCHESTRATORS), values)

    def teacher_rollout(
        self, name: str, teacher: TeacherConfig | None, environments: Collection[str]
    ) -> RolloutConfig | None:
        """Where a run's teacher plays. None if it plays nothing, or one runs already."""
        if not environments or teacher is None or teacher.rollout is not None:
            return None
        rollout = self.rollout
        values: dict[str, object] = {
            "env": [entry.model_dump() for entry in rollout.env if entry.resolved_name in environments],
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
            "server.port": self.free_port(rollout.server.host),
            "output_dir": rollout.output_dir / name,
        }
        return with_values(rollout, values)

    @cached_property
    def rollout(self) -> RolloutConfig:
        config = self.config
        client = {**config.rollout.client.model_dump(), "base_url": []}
        if (
            config.inference is not None
            and not {"api_key_var", "api_key_file"} & config.rollout.client.model_fields_set
        ):
            client |= {"api_key_var": config.inference.api_key_var, "api_key_file": config.inference.api_key_file}
        env = [entry.model_dump() for entry in config.local_environments or config.rollout.env]
        rollout = RolloutConfig.model_validate(
            {**config.rollout.model_dump(), "client": client, "weights": self.hub, "env": env}
        )
        return _with_port(rollout, self.free_port)

    def deadlines(self, given: DeadlinesConfig, trainer_held_s: float) -> dict[str, object]:
        """An orchestrator's waits, where it names none itself."""
        config, hub_deadline_s = self.config, self.config.trainer.hub_deadline_s
        values: dict[str, object] = {}
        if "startup_s" not in given.model_fields_set:
            values["deadlines.startup_s"] = max(given.startup_s, hub_deadline_s + START_MARGIN_S) + trainer_held_s
        if "unreachable_s" not in given.model_fields_set and (config.restarts or config.restarts_of("trainer")):
            values["deadlines.unreachable_s"] = RESTART_DEADLINE_S + hub_deadline_s
        return values

    def engines(self) -> list[Part]:
        config, given = self.config, self.config.inference
        if given is None:
            return []
        broadcast, lora = given.weight_broadcast or config.trainer.weight_broadcast, config.trainer.model.lora
        adapter_rank = None
        if lora is not None and config.trainer.weight_broadcast.lora_adapter_only:
            adapters = [run.run.lora for run in config.runs if run.run.lora is not None]
            adapter_rank = max(lora.rank, *(own.rank or 0 for own in adapters), 0)
        hosts = self.placement.hosts or (given.server.host,) * config.engine_count
        parts = []
        for number, host in enumerate(hosts):
            port = given.server.port + hosts[:number].count(host) if given.server.port else self.free_port(host)
            values: dict[str, object] = {
                "server.host": host,
                "server.port": port,
                "weight_broadcast": {**broadcast.model_dump(), "address": self.hub},
                "share_gpu": given.share_gpu or self.placement.shared(number),
                "lora_rank": given.lora_rank or adapter_rank,
                "max_loras": max(given.max_loras, min(2 * config.trainer.max_concurrent_runs, MOST_LORAS)),
                "enable_return_routed_experts": given.enable_return_routed_experts
                or config.trainer.enable_router_replay,
                "api_key": None,  # it comes through the environment: the configuration is written to a file
            }
            if (given.vllm_argument("data_parallel_size") or 1) > 1 and not given.vllm_argument(
                "data_parallel_rpc_port"
            ):
                # vLLM's own default is the same for all runs
                values["data_parallel_rpc_port"] = self.free_port(host)
            if config.engine_count > 1 and given.engine_id:
                values["engine_id"] = f"{given.engine_id}-{number + 1}"
            if number and given.seed is not None:
                values["seed"] = given.seed + number  # engines with one seed would sample the same replies to a prompt
            engine = with_values(given, values)
            parts.append(
                Part(
                    name="inference" if number == 0 else f"inference_{number + 1}",
                    module="meshrl.inference.main",
                    config=engine,
                    end_stage=ENGINES,
                    environ=gpu_variables(self.placement.engines[number])
                    | key_environ(given.api_key, engine.api_key_var),
                    python=engine.python,
                    restarts=config.restarts_of("inference"),
                )
            )
        return parts


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """A validated copy with some keys, by dotted path, set anew."""
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


def key_environ(key: SecretStr | None, variable: str) -> dict[str, str]:
    return {} if key is None else {variable: checked(key.get_secret_value(), "inference.api_key")}


def gpu_variables(gpus: Sequence[str] | None) -> dict[str, str]:
    return {} if gpus is None else {VISIBLE_GPUS: ",".join(gpus)}


def _with_port(config: Server, free_port: Callable[[str], int]) -> Server:
    server = config.server
    return config if server.port else with_values(config, {"server.port": free_port(server.host)})


def own_keys(program: type[Config], section: BaseConfig, others: Mapping[str, bool | set[str]]) -> Config:
    return program.model_validate(section.model_dump(exclude=dict(others)))
