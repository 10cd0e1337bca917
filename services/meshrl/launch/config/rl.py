"""Configuration of `rl`: the five programs' own, and the keys that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from meshrl.client.credentials import PREFIX
from meshrl.core.config import BaseConfig
from meshrl.core.config.layers import Layer
from meshrl.core.config.schema import ReadTable, Table
from meshrl.core.config.shared import EnvConfig, LogConfig, ModelConfig, TlsConfig, WandbConfig, WeightBroadcastConfig
from meshrl.core.private_folders import ReadableBy
from meshrl.core.slurm.config import SlurmConfig
from meshrl.inference.config import AUTO_MODEL_LEN, InferenceConfig
from meshrl.launch.config.completion import complete
from meshrl.launch.config.presets import AlgorithmName, apply_preset
from meshrl.launch.config.sections import (
    OrchestratorSection,
    RolloutSection,
    RunDeploymentConfig,
    RunSection,
    WeightsSection,
)
from meshrl.launch.config.shared_keys import COMPONENTS, HandedTo, every_component, hand_down, handed_down
from meshrl.launch.gpus import GpuDemand
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.training.config import CheckpointConfig


class RLConfig(BaseConfig):
    """Trains a model by reinforcement learning: starts rollout, trainer, weights, inference and orchestrator.

    Shared keys at the top are handed down to the components. Within one file, or on the command line, a component's own
    key wins over the shared one; between them the usual order holds, so --max-steps beats max_steps of any file. rl
    chooses the addresses of programs that it starts.
    """

    everyday_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "What is trained, on what": (
            "model.name", "orchestrator.train.env.N.id", "orchestrator.train.env.N.ratio", "orchestrator.eval",
            "algorithm",
        ),
        "How long, how much": (
            "max_steps", "seq_len", "orchestrator.batch_size", "orchestrator.group_size", "trainer.optim.lr",
            "max_async_level", "orchestrator.sampling.max_tokens", "orchestrator.sampling.temperature", "seed",
        ),
        "Where it runs": (
            "inference", "num_engines", "deployment.num_train_gpus", "deployment.num_infer_gpus", "trainer_gpu_ids",
            "inference_gpu_ids", "restarts", "slurm", "deployment.type", "mesh",
        ),
        "What it leaves": (
            "output_dir", "clean_output_dir", "ckpt", "ckpt.interval", "ckpt.resume_step", "wandb", "wandb.project",
            "wandb.name", "log.level",
        ),
        "Before it starts": ("dry_run", "preflight"),
    }  # fmt: skip

    output_dir: Annotated[Path, HandedTo(every_component("output_dir"))] = Path("outputs")
    """Folder of the run; the same for every program."""

    readable_by: Annotated[ReadableBy, HandedTo(every_component("readable_by"))] = "owner"
    """Who may read what the run writes: its own user alone, its files' group too, or everyone. Credentials stay for the
    owner."""

    model: Annotated[ModelConfig | None, HandedTo(("trainer.model", "inference.model", "rollout.model"))] = None
    """The model, for trainer, inference and rollout."""

    seq_len: Annotated[
        int | None,
        HandedTo(
            ("trainer.seq_len", "orchestrator.seq_len", "rollout.seq_len", "inference.max_model_len", "runs.*.seq_len")
        ),
    ] = Field(default=None, ge=2)
    """Longest sequence in tokens, for every program; for inference as max_model_len."""

    show_rows: Annotated[int | None, HandedTo(("rollout.show_rows",))] = Field(default=None, ge=0, le=64)
    """First prompts that each worker of rollout logs, for rollout."""

    max_steps: Annotated[
        int | None, HandedTo(("trainer.max_steps", "orchestrator.max_steps", "runs.*.max_steps"), even_none=True)
    ] = Field(default=None, ge=1)
    """Training steps, for trainer, orchestrator and each of `runs`."""

    algorithm: AlgorithmName | None = None
    """Advantage and loss of an algorithm (see meshrl.launch.config.presets), for orchestrator and trainer. None leaves
    both to their own keys."""

    max_async_level: Annotated[int | None, HandedTo(("orchestrator.max_async_level", "runs.*.max_async_level"))] = (
        Field(default=None, ge=0)
    )
    """Most steps that generation may run ahead of training, for the orchestrators."""

    seed: Annotated[int | None, HandedTo(("trainer.seed", "orchestrator.seed", "inference.seed", "runs.*.seed"))] = None
    """Seed, for trainer, orchestrators and inference."""

    run_id: Annotated[str | None, HandedTo(("trainer.run_id", "orchestrator.run_id"))] = Field(
        default=None, min_length=1
    )
    """Name of the run, for trainer and orchestrator."""

    log: Annotated[LogConfig, HandedTo(every_component("log"))] = LogConfig()
    """Logging, for every program and rl itself."""

    tls: Annotated[TlsConfig, HandedTo(every_component("tls"))] = TlsConfig()
    """Certificates and tokens, for every program; by default rl makes them."""

    wandb: Annotated[WandbConfig | None, HandedTo(("orchestrator.wandb", "runs.*.wandb"), even_none=True)] = None
    """Weights & Biases: one run for all programs, and one for each of `runs`. None means off."""

    ckpt: Annotated[CheckpointConfig | None, HandedTo(("trainer.ckpt",), even_none=True)] = None
    """Checkpoints. None means off."""

    weight_broadcast: Annotated[
        WeightBroadcastConfig | None, HandedTo(("trainer.weight_broadcast", "inference.weight_broadcast"))
    ] = None
    """How weights travel, for trainer and inference."""

    bench: Annotated[bool, HandedTo(("orchestrator.bench",))] = False
    """Measure throughput over a few steps, by the orchestrator."""

    clean_output_dir: bool = False
    """Empty output_dir before the start, if it looks like a run's."""

    dry_run: bool = False
    """Check everything, write the resolved configurations to output_dir/configs and end."""

    preflight: bool = True
    """Check model, checkpoint, environments, ports, disk and more, and list everything that is missing."""

    deployment: Annotated[
        RunDeploymentConfig, HandedTo(("trainer.deployment.num_train_gpus",), key="num_train_gpus")
    ] = RunDeploymentConfig()
    """GPUs of inference and of the trainer, and the nodes of a job."""

    slurm: SlurmConfig | None = None
    """Submit the run as a SLURM job. None starts it here."""

    trainer_gpu_ids: list[int] | None = Field(default=None, min_length=1)
    """GPUs of the trainer, as places among the visible ones, each with a process. None takes those that inference
    leaves."""

    inference_gpu_ids: list[int] | None = None
    """GPUs of inference, divided among the engines. On a GPU shared with the trainer the engine takes half of the
    memory, or gpu_memory_utilization."""

    num_engines: int | None = Field(default=None, ge=1)
    """Inference programs to start. None: as many as the GPUs of inference hold, at tensor_parallel_size times
    data_parallel_size each."""

    restarts: int = Field(default=0, ge=0)
    """How often each program is restarted when it dies; a third death in a row before it served ends the run. A trainer
    continues from its last checkpoint, so ckpt.interval is required."""

    trainer_restarts: int | None = Field(default=None, ge=0)
    """The same for the trainer. None takes `restarts`."""

    orchestrator_restarts: int | None = Field(default=None, ge=0)
    """The same for the orchestrator, which needs no checkpoint. None takes `restarts`."""

    engine_restarts: int = Field(default=0, ge=0)
    """The same for inference programs; the larger number counts."""

    shutdown_grace_s: float = Field(default=60.0, gt=0.0)
    """How long programs may drain at the end before they are killed."""

    failure_grace_s: float = Field(default=4.0, gt=0.0, le=8.0)
    """How long they may take once one of them has died."""

    trainer: TrainerConfig = TrainerConfig()
    """The trainer."""

    orchestrator: Annotated[
        OrchestratorSection,
        HandedTo(("rollout.model",), key="model"),
        HandedTo(("rollout.client",), key="client"),
        HandedTo(("rollout.vf_level",), key="log.vf_level"),
    ] = OrchestratorSection()
    """The orchestrator of the trainer's own run. Without an environment to train on there are only `runs` and those
    that join the mesh."""

    mesh: Path | None = None
    """Folder of a running mesh: start only the orchestrator of one more run there, run_id. The trainer's section gives
    its adapter, optimizer, schedule and loss. A file may also hold the orchestrator's keys alone."""

    runs: list[RunSection] = Field(default_factory=list)
    """Runs that train adapters of their own: the keys of their orchestrators, with run_id and [runs.run]. The trainer
    needs model.lora."""

    inference: InferenceConfig | None = None
    """The inference engine to start. Engines in orchestrator.client.base_url run already and are used too. With
    neither, one is expected at http://127.0.0.1:8000."""

    rollout: RolloutSection
    """The rollout program, with the environments of the orchestrator unless rollout.env lists some."""

    weights: Annotated[WeightsSection, HandedTo(("trainer.weight_broadcast.type",), key="transport")] = WeightsSection()
    """The weight hub."""

    @property
    def local_environments(self) -> list[EnvConfig]:
        """Of the rollout program, if that is started."""
        elsewhere = self.orchestrator.environments_elsewhere
        hosted = self.rollout.env if self.starts("rollout") else []
        return [entry for entry in hosted if entry.resolved_name not in elsewhere]

    def starts(self, program: str) -> bool:
        """Whether it is neither off nor running already."""
        return getattr(self, program) is not None and program not in self.orchestrator.services.replaced()

    @property
    def feeds_own_run(self) -> bool:
        return bool(self.orchestrator.train.env) or not self.takes_runs

    @property
    def orchestrators(self) -> dict[str, OrchestratorConfig]:
        """Those that are started, by key."""
        own = {"orchestrator": self.orchestrator} if self.feeds_own_run else {}
        return own | {f"runs.{place}": run for place, run in enumerate(self.runs)}

    @property
    def takes_runs(self) -> bool:
        return bool(self.runs) or self.trainer.max_concurrent_runs > 1

    def _orchestrated(self) -> Iterator[tuple[tuple[str, ...], EnvConfig]]:
        orchestrators = {("orchestrator",): self.orchestrator} | {
            ("runs", str(place)): run for place, run in enumerate(self.runs)
        }
        for section, orchestrator in orchestrators.items():
            lists: dict[str, Sequence[EnvConfig]] = {"train": orchestrator.train.env}
            if orchestrator.eval is not None:
                lists["eval"] = orchestrator.eval.env
            for part, entries in lists.items():
                for place, entry in enumerate(entries):
                    yield (*section, part, "env", str(place)), entry

    def place_of(self, environment: str) -> tuple[str, ...]:
        """The path of its entry, for error messages."""
        hosted = ((("rollout", "env", str(place)), entry) for place, entry in enumerate(self.rollout.env))
        return next(place for place, entry in (*self._orchestrated(), *hosted) if entry.resolved_name == environment)

    @property
    def engine_count(self) -> int:
        if self.inference is None:
            return 0
        given = self._given_gpus()
        return self.num_engines or max(1, (given or 0) // self.inference.gpus_per_engine())

    @property
    def running_engines(self) -> tuple[str, ...]:
        """Base URLs: the given ones, else the usual one if none is started."""
        return tuple(url.rstrip("/").removesuffix("/v1") for url in self.rollout.client.base_url)

    @property
    def gpu_demand(self) -> GpuDemand:
        given, engines = self._given_gpus(), 0
        if self.inference is not None:
            engines = self.engine_count * self.inference.gpus_per_engine() if given is None else given
        return GpuDemand(
            engines=self.engine_count,
            for_engines=engines,
            for_trainer=self.trainer.deployment.num_train_gpus if self.starts("trainer") else 0,
            num_infer_gpus=self.deployment.num_infer_gpus,
            inference_gpu_ids=self.inference_gpu_ids,
            trainer_gpu_ids=self.trainer_gpu_ids,
        )

    def makes_credentials(self, environ: Mapping[str, str]) -> bool:
        """Whether neither keys nor variables name others, or refuse them between its nodes."""
        parts = [getattr(self, name) for name in COMPONENTS]
        named = any(part is not None and part.tls != TlsConfig() for part in (self, *parts))
        named = named or any(variable.startswith(PREFIX) and value for variable, value in environ.items())
        return not named and not (self.deployment.type == "multi_node" and self.deployment.insecure)

    @property
    def hub_is_open(self) -> bool:
        """Whether programs call it that were started before and do not know its tokens."""
        given = self.orchestrator.services.given()
        return "weights" not in given and bool({"rollout", "trainer"} & set(given))

    def _given_gpus(self) -> int | None:
        return self.deployment.num_infer_gpus if self.inference_gpu_ids is None else len(self.inference_gpu_ids)

    def restarts_of(self, program: str) -> int:
        own = {"trainer": self.trainer_restarts, "orchestrator": self.orchestrator_restarts}.get(program)
        if program == "inference":
            own = max(self.engine_restarts, self.restarts)
        return self.restarts if own is None else own

    @classmethod
    def hand_down(cls, layers: Sequence[Layer]) -> None:
        for layer in layers:
            apply_preset(layer)
        hand_down(cls, layers)

    @classmethod
    def complete(cls, values: ReadTable) -> Table:
        return complete(values)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = [
            *self._running(), *self._environments(), *self._many_runs(), *self._differences(), *self._lengths(),
            *self._processes(), *self._slow_links(),
        ]  # fmt: skip
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _running(self) -> list[str]:
        running, problems = self.orchestrator.services, []
        hub_is_known = running.weights is not None or self.weights.server.port != 0
        if running.trainer is not None and not hub_is_known:
            problems.append(
                f"orchestrator.services.trainer is {running.trainer!r}, a trainer that publishes to the hub that it was"
                " started with; give that hub in orchestrator.services.weights, or its port in weights.server.port"
            )
        engine_is_known = self.inference is None or self.inference.server.port != 0
        listed = running.given().get("rollout")
        if listed and not hub_is_known and not engine_is_known:
            at = " and ".join(map(repr, listed))
            problems.append(
                f"orchestrator.services.rollout is {at}, which cannot know the ports that rl chooses for"
                " hub and engine; set weights.server.port or inference.server.port to what it was started with, or"
                " give orchestrator.services.weights"
            )
        return problems

    def _slow_links(self) -> list[str]:
        if not self.trainer.enable_router_replay or self.trainer.router_replay_over_wan:
            return []
        broadcasts = {"trainer": self.trainer.weight_broadcast}
        if self.inference is not None and self.inference.weight_broadcast is not None:
            broadcasts["inference"] = self.inference.weight_broadcast
        slow = ["orchestrator.exchange"] if self.orchestrator.exchange is not None else []
        for program, broadcast in broadcasts.items():
            slow += [f"{program}.weight_broadcast.{key}" for key in ("relays", "max_mbps") if getattr(broadcast, key)]
        if not slow:
            return []
        verb = "is" if len(slow) == 1 else "are"
        return [
            f"trainer.enable_router_replay sends hundreds of bytes with each token, and {', '.join(slow)} {verb} for"
            " slow links; set trainer.router_replay_over_wan to send them all the same, or leave replay out"
        ]

    def _environments(self) -> list[str]:
        known: dict[str, EnvConfig] = {}
        for place, entry in self._orchestrated():
            first = known.setdefault(entry.resolved_name, entry)
            if (first.id, first.args) != (entry.id, entry.args):
                return [
                    f"{place[0]}: two environments are called {entry.resolved_name!r} but differ in id or args; give"
                    " one of them another name"
                ]
        return []

    def _many_runs(self) -> list[str]:
        names = [run.run_id for run in self.runs]
        problems = [
            f"runs: two runs are called {name!r}; give one of them another run_id"
            for name in sorted(
                {name for name in (*names, self.trainer.run_id) if [*names, self.trainer.run_id].count(name) > 1}
            )
        ]
        if self.runs and self.trainer.max_concurrent_runs == 1:
            problems.append(
                f"trainer.max_concurrent_runs is 1, but {len(self.runs)} run(s) are to be added; set it to"
                f" {max(2, len(self.runs))}, or leave it out"
            )
        shared, usual = set(handed_down(type(self))), type(self.orchestrator)()
        used = {"services", *(each.key.partition(".")[0] for each in type(self).model_fields["orchestrator"].metadata)}
        unused = [
            key
            for name in sorted(self.orchestrator.model_fields_set - used)
            if (key := f"orchestrator.{name}") not in shared
            and getattr(self.orchestrator, name) != getattr(usual, name)
        ]
        if unused and not self.feeds_own_run:
            verb = "is" if len(unused) == 1 else "are"
            problems.append(
                f"{', '.join(unused)} {verb} set, but the trainer's own run has no orchestrator here, since"
                " orchestrator.train.env lists no environment; list one, or set the keys in [[runs]]"
            )
        return problems

    def _differences(self) -> list[str]:
        parts = {name: getattr(self, name) for name in COMPONENTS if self.starts(name)}
        problems = [
            f"{name}.output_dir is {str(part.output_dir)!r} but output_dir is {str(self.output_dir)!r};"
            " a run has one folder: set output_dir only"
            for name, part in parts.items()
            if part.output_dir != self.output_dir
        ]
        problems += [
            f"{name}.model.name is {parts[name].model.name!r} but trainer.model.name is {self.trainer.model.name!r};"
            " set model.name once"
            for name in ("inference", "rollout")
            if {name, "trainer"} <= parts.keys() and parts[name].model.name != self.trainer.model.name
        ]
        if "trainer" in parts and self.orchestrator.run_id not in ("", self.trainer.run_id):
            problems.append(
                f"orchestrator.run_id is {self.orchestrator.run_id!r} but the trainer's run is"
                f" {self.trainer.run_id!r}; set run_id once"
            )
        transport, used = self.weights.transport, self.trainer.weight_broadcast.type
        if transport not in (None, used):
            problems.append(
                f"weights.transport is {transport!r} but trainer.weight_broadcast.type is {used!r};"
                " set weights.transport only"
            )
        problems += self._restarts()
        if self.trainer.bench is not None:
            problems.append("trainer.bench measures the trainer without a run; start `trainer --bench`, or set bench")
        if self.inference is not None and self.inference.bench is not None:
            problems.append("inference.bench measures an engine without a run; start `inference --bench`, or set bench")
        level = self.orchestrator.max_async_level
        if self.inference is not None and self.inference.sleep_while_training and level > 0:
            problems.append(
                f"inference.sleep_while_training needs max_async_level 0, got {level}: above it engines generate while"
                " the trainer trains; set max_async_level to 0, or leave sleep_while_training out"
            )
        if self.inference is not None and self.deployment.type == "single_node":
            problems += [self.inference.unpublished] if self.inference.unpublished else []
            if self.inference.url is not None and self.engine_count > 1:
                problems.append(
                    f"inference.url is the address of one engine, and rl starts {self.engine_count}; set"
                    " inference.server.host to the address at which others reach this machine, and leave url out"
                )
        adapters = self.trainer.model.lora is not None and self.trainer.weight_broadcast.lora_adapter_only
        if self.inference is not None and self.inference.enable_lora is False and adapters:
            problems.append(
                "inference.enable_lora is false, but trainer.model.lora publishes adapters; leave enable_lora out, or"
                " publish merged weights with trainer.weight_broadcast.lora_adapter_only = false"
            )
        if self.inference is not None and self.inference.headless:
            problems.append("inference.headless is for other nodes; start `inference --headless` there, and rl here")
        return problems

    def _restarts(self) -> list[str]:
        ckpt, count = self.trainer.ckpt, self.restarts_of("trainer")
        if not count or not self.starts("trainer"):
            return []
        key = "restarts" if self.trainer_restarts is None else "trainer_restarts"
        if ckpt is None or ckpt.interval is None:
            return [
                f"{key} is {count} but trainer.ckpt.interval is not set: a trainer that dies would lose every step;"
                " set ckpt.interval, or trainer_restarts to 0"
            ]
        if ckpt.weights_only:
            return [f"{key} is {count} and needs whole checkpoints to go on from; leave ckpt.weights_only out"]
        return []

    def _processes(self) -> list[str]:
        problems = []
        wanted, gpus = self.trainer.deployment.num_train_gpus, self.trainer_gpu_ids
        if gpus is not None and wanted > len(gpus):
            problems.append(
                f"deployment.num_train_gpus is {wanted} but trainer_gpu_ids lists {len(gpus)} GPU(s); list as many, or"
                " leave deployment.num_train_gpus out"
            )
        count, listed = self.deployment.num_infer_gpus, self.inference_gpu_ids
        if count is not None and listed is not None and count != len(listed):
            problems.append(
                f"deployment.num_infer_gpus is {count} but inference_gpu_ids lists {len(listed)} GPU(s); leave"
                " deployment.num_infer_gpus out"
            )
        if self.inference is not None:
            return problems + self._engine_sizes(self.inference.gpus_per_engine())
        if (self.num_engines or 1) > 1:
            problems.append(f"num_engines is {self.num_engines} but inference is off; add [inference] or leave it out")
        if count is not None:
            problems.append(
                f"deployment.num_infer_gpus is {count} but inference is off; add [inference] or leave it out"
            )
        return problems

    def _engine_sizes(self, each: int) -> list[str]:
        given = self._given_gpus()
        engines = self.engine_count
        if not given or given == engines * each or (each == 1 and given < engines):
            return []
        key = "inference_gpu_ids" if self.inference_gpu_ids is not None else "deployment.num_infer_gpus"
        fitting = engines * each
        return [
            f"{key} gives inference {given} GPU(s), but {engines} engine(s) of {each} take {fitting};"
            f" give {fitting}, or change num_engines, inference.tensor_parallel_size or inference.data_parallel_size"
        ]

    def _lengths(self) -> list[str]:
        problems = []
        for name, orchestrator in self.orchestrators.items() if self.starts("trainer") else ():
            if orchestrator.seq_len > self.trainer.seq_len:
                problems.append(
                    f"{name}.seq_len ({orchestrator.seq_len}) is more than trainer.seq_len"
                    f" ({self.trainer.seq_len}); set seq_len once, or lower the orchestrator's"
                )
            last, most = orchestrator.last_step, self.trainer.max_steps
            if most is not None and (last is None or last > most):
                problems.append(
                    f"{name}.max_steps ({last}) is more than trainer.max_steps ({most}); set max_steps once"
                )
        longest = None if self.inference is None else self.inference.max_model_len
        longest = AUTO_MODEL_LEN if longest == "auto" else longest
        if longest is not None and self.starts("rollout") and self.rollout.seq_len > longest:
            problems.append(
                f"rollout.seq_len ({self.rollout.seq_len}) is more than inference.max_model_len"
                f" ({longest}); raise max_model_len, or lower seq_len"
            )
        return problems
