"""Configuration of the `orchestrator` program; composed by the `rl` launcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import (
    GROUP_SIZE_SPELLINGS,
    LogConfig,
    LogExtrasConfig,
    PrimeMonitorConfig,
    SamplingConfig,
    Seed,
    ServerConfig,
    ServicesConfig,
    TlsConfig,
    WandbConfig,
    log_extras_of,
    refuse_repeated_names,
)
from meshrl.core.paths import ORCH_TOML, Layout
from meshrl.core.private_folders import ReadableBy
from meshrl.diagnosis.causes import CAUSES
from meshrl.orchestrator.config.algorithms import TAUGHT, AdvantageConfig, AlgoConfig, TeacherConfig
from meshrl.orchestrator.config.environments import EvalConfig, TrainEnvsConfig
from meshrl.orchestrator.exchange.config import ExchangeConfig
from meshrl.sampling.retry import RunError
from meshrl.wire.types import AdapterSpec, LossSpec, OptimizerSpec, RunSpec, ScheduleSpec, StartPoint


class FilterConfig(BaseConfig):
    """Which finished groups are not worth a gradient."""

    zero_signal: bool = True
    """Drop groups whose rewards are all equal: their advantages are zero. Others replace them."""

    zero_signal_tolerance: float = Field(default=1e-8, ge=0.0)
    """Rewards that differ by no more than this count as equal."""

    max_zero_signal_groups: int = Field(default=1000, ge=1)
    """Stop with an error after so many zero-signal groups in a row."""

    max_lost_groups: int = Field(default=64, ge=1)
    """Stop with an error after so many groups in a row that failures left with fewer than two rollouts."""

    empty: bool = True
    """Drop rollouts in which the policy sampled no token."""


class RunLoraConfig(BaseConfig):
    """The adapter of a run of its own."""

    rank: int | None = Field(default=None, ge=1)
    """Rank of the product; None is that of trainer.model.lora."""

    alpha: float | None = Field(default=None, gt=0.0)
    """Scale: a layer adds alpha / rank times the product; None is twice the rank."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the adapter's input dropped in training."""

    target_modules: list[str] = Field(default_factory=list)
    """Layers that have it, such as q_proj; empty: those of trainer.model.lora."""


class RunLossConfig(BaseConfig):
    """The policy loss of a run of its own."""

    name: str
    """Its name, as trainer.loss.type has it."""

    constants: dict[str, float] = Field(default_factory=dict)
    """Its constants by name; the others keep their defaults."""


class RunOptimConfig(BaseConfig):
    """The optimizer of a run of its own, beside its learning rate and type; None is as in trainer.optim."""

    weight_decay: float | None = Field(default=None, ge=0.0)
    """Weight decay, decoupled but for sgd."""

    betas1: float | None = Field(default=None, ge=0.0, lt=1.0)
    """adamw: decay of the first moment."""

    betas2: float | None = Field(default=None, ge=0.0, lt=1.0)
    """adamw: decay of the second moment."""

    eps: float | None = Field(default=None, gt=0.0)
    """adamw: term that keeps the update finite."""

    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    """muon, sgd: decay of the momentum."""

    max_norm: float | None = Field(default=None, ge=0.0)
    """Gradients are scaled down to this norm; 0: never."""


class RunSchedulerConfig(BaseConfig):
    """The learning rate of a run of its own over the steps; None is as in trainer.scheduler."""

    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the decay."""

    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps over which the rate rises to its peak."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Length of the decay."""

    min_lr: float | None = Field(default=None, ge=0.0)
    """Rate at the end of the decay and after it."""


class NewRunConfig(BaseConfig):
    """A run that this orchestrator makes at a trainer of several runs, unless it exists."""

    lora: RunLoraConfig | None = None
    """Its adapter; None is as trainer.model.lora has it."""

    lr: float | None = Field(default=None, gt=0.0)
    """Peak learning rate; None is trainer.optim.lr."""

    optim_type: Literal["adamw", "muon", "sgd"] = "adamw"
    """Type of the optimizer that lr is for."""

    optim: RunOptimConfig = RunOptimConfig()
    """More of the optimizer."""

    scheduler: RunSchedulerConfig | None = None
    """The learning rate over the steps; None is trainer.scheduler."""

    loss: RunLossConfig | None = None
    """The policy loss; None is trainer.loss."""

    share: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Its share of the trainer's time while other runs have work, relative to theirs."""

    start_from: str | None = None
    """Start from another run's checkpoint: the newest of RUN, or RUN@STEP; None is the base model. A run with
    checkpoints of its own goes on from these."""

    start_with_optimizer: bool = False
    """Take the optimizer, schedule and step of start_from as well as its weights."""

    delete: bool = False
    """Delete the run from the trainer once it is trained; its checkpoints stay."""

    @field_validator("start_from")
    @classmethod
    def _is_a_start(cls, text: str | None) -> str | None:
        if text is not None:
            StartPoint.read(text)
        return text

    def spec(self, default: AdapterSpec | None = None) -> RunSpec:
        """What is not set is as in the trainer's configuration. Raises ValueError for an adapter without a rank, here
        and in the trainer's `default`."""
        adapter, optim, schedule = None, self.optim, self.scheduler
        if self.lora is not None:
            rank = self.lora.rank or (None if default is None else default.rank)
            if rank is None:
                raise ValueError(
                    "orchestrator.run.lora.rank is missing, and the trainer reports none of its own; set it"
                )
            targets = tuple(self.lora.target_modules)
            alpha = self.lora.alpha or 2.0 * rank
            adapter = AdapterSpec(rank=rank, alpha=alpha, dropout=self.lora.dropout, target_modules=targets)
        optimizer = OptimizerSpec(
            type=self.optim_type,
            learning_rate=self.lr,
            beta1=optim.betas1,
            beta2=optim.betas2,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            max_grad_norm=optim.max_norm,
        )
        return RunSpec(
            adapter=adapter,
            optimizer=None if optimizer == OptimizerSpec(type="adamw") else optimizer,
            schedule=None
            if schedule is None
            else ScheduleSpec(
                type=schedule.type,
                warmup_steps=schedule.warmup_steps,
                decay_steps=schedule.decay_steps,
                min_learning_rate=schedule.min_lr,
            ),
            loss=None if self.loss is None else LossSpec(name=self.loss.name, constants=self.loss.constants),
            share=self.share,
            start_from=None
            if self.start_from is None
            else StartPoint.read(self.start_from, with_optimizer=self.start_with_optimizer),
        )


class AlertsConfig(BaseConfig):
    """The causes of `meshrl doctor`, looked for after each step. The log and W&B get them."""

    ignore: list[str] = Field(default_factory=list)
    """Causes that are not looked for, such as idle_engines."""

    webhook_var: str | None = None
    """Environment variable with the URL to which each new alert is posted, as JSON with `text`; None posts nothing."""

    @field_validator("ignore")
    @classmethod
    def _known(cls, ignored: list[str]) -> list[str]:
        known = [cause.name for cause in CAUSES]
        if unknown := sorted(set(ignored) - set(known)):
            raise ValueError(f"orchestrator.alerts.ignore: unknown cause {unknown[0]!r}; there are {', '.join(known)}")
        return ignored


class DeadlinesConfig(BaseConfig):
    """Longest waits of the orchestrator, in seconds."""

    startup_s: float = Field(default=300.0, gt=0.0)
    """For rollout, trainer and weights to serve, and for version 0 to be active."""

    group_s: float = Field(default=600.0, gt=0.0)
    """For one group of rollouts; those still running then count as failures."""

    unreachable_s: float = Field(default=8.0, gt=0.0)
    """For a service that does not answer to come back; then the run ends."""

    retry_s: float = Field(default=300.0, gt=0.0)
    """For refused groups (overload, or no engine has the version) to be accepted, over all attempts."""

    place_s: float = Field(default=3600.0, gt=0.0)
    """For a place at a trainer that holds as many runs as it may."""

    batch_s: float = Field(default=3600.0, gt=0.0)
    """For the groups of one step."""

    step_s: float = Field(default=3600.0, gt=0.0)
    """For the trainer to finish one step."""

    activation_s: float = Field(default=120.0, gt=0.0)
    """For engines to prepare and serve a new version; then it is skipped if the law allows that."""

    eval_s: float = Field(default=3600.0, gt=0.0)
    """For one evaluation."""

    sleep_s: float = Field(default=60.0, gt=0.0)
    """For engines to fall asleep, with sleep_engines; then the step goes on beside those awake."""


class LogprobCheckConfig(BaseConfig):
    """At the start, whether engines and trainer give the same tokens the same logprobs."""

    max_mean_abs: float = Field(default=0.05, gt=0.0)
    """Largest mean of |trainer logprob - engine logprob| in nats that counts as rounding; bfloat16 gives about 0.003,
    another model 0.5 and more."""

    fatal: bool = False
    """End the run if they differ, before the first new version is served; otherwise warn."""


class RolloutSamplesConfig(BaseConfig):
    """Rollouts kept for people to read, in `rollouts/step_N.jsonl.zst` of the output folder."""

    interval: int = Field(default=1, ge=1)
    """Keep some of every so many steps."""

    best: int = Field(default=2, ge=0)
    """Of each environment, those with the highest rewards."""

    worst: int = Field(default=2, ge=0)
    """Of each environment, those with the lowest rewards."""

    random: int = Field(default=4, ge=0)
    """Of each environment, others drawn by chance."""

    max_mib: float = Field(default=4.0, gt=0.0)
    """Most MiB of a step before compression, about a tenth on disk. Failures come first, then the worst, the best and
    the others."""


class OrchestratorConfig(BaseConfig):
    """Schedules rollouts, makes batches, submits them, activates the versions that come out."""

    train: TrainEnvsConfig = TrainEnvsConfig()
    """Training data."""

    eval: EvalConfig | None = None
    """Evaluations during the run; None means none."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts; an unset value takes the environment's default."""

    batch_size: int = Field(default=128, ge=2)
    """Rollouts per step; a multiple of every environment's group_size."""

    group_size: int = Field(default=8, ge=1, validation_alias=GROUP_SIZE_SPELLINGS)
    """Rollouts per task. The older spelling rollouts_per_example is accepted."""

    seq_len: int = Field(default=2048, ge=2)
    """Token budget of a micro-batch, to which longer rollouts are cut; at most the trainer's seq_len. rl defaults to a
    longer seq_len of the trainer: a GPU computes long rows faster."""

    max_steps: int | None = Field(default=None, ge=1)
    """Stop after so many steps; None runs until it is stopped."""

    max_async_level: int = Field(default=2, ge=0)
    """Most steps that generation may be ahead of training: 0 is synchronous on-policy, 1 full overlap."""

    max_off_policy_steps: int = Field(default=8, ge=0)
    """Drop a rollout whose oldest token is more versions than this behind the policy that trains it."""

    max_inflight_rollouts: int | None = Field(default=None, ge=1)
    """Most training rollouts in flight; None is batch_size times (max_async_level + 1)."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards of a group become advantages, for grpo, hierarchical_grpo and echo."""

    algo: AlgoConfig | None = None
    """The algorithm of every training environment without its own; None follows training_mode."""

    training_mode: Literal["rl", "opd", "sft"] = "rl"
    """Training signal if no algorithm is named. rl: rewards (the algorithm grpo). opd: a teacher's scores of the
    policy's own tokens. sft: rollouts that a teacher plays."""

    teacher: TeacherConfig | None = None
    """The model that algorithms with a teacher learn from. rl does not start it."""

    filters: FilterConfig = FilterConfig()
    """Which finished groups are dropped."""

    deadlines: DeadlinesConfig = DeadlinesConfig()
    """Longest waits for other programs."""

    alerts: AlertsConfig = AlertsConfig()
    """What is looked for in each step's metrics, and who gets it."""

    logprob_check: LogprobCheckConfig = LogprobCheckConfig()
    """In the first step with enough data, compare the logprobs of engines and trainer."""

    activation_policy: Literal["rolling", "gang"] = "rolling"
    """rolling: each engine takes a version when it has it; gang: all engines together."""

    min_ready: int = Field(default=0, ge=0)
    """Engines that must serve a version before its activation counts; 0 means all in the pool."""

    sleep_engines: bool = False
    """At max_async_level 0, have engines give their memory back while the trainer trains. rl sets it with
    inference.sleep_while_training."""

    engine_pool: str = ""
    """Pool of engines to sample from; empty is the only or first one."""

    run_id: str = ""
    """Run of the trainer to feed; empty is the trainer's own run."""

    run: NewRunConfig | None = None
    """Make the run of run_id if the trainer lacks it. None: it must exist."""

    checkpoint_interval: int | None = Field(default=None, ge=1)
    """Steps between the trainer's checkpoints: batches are kept until theirs is on disk, for a trainer that restarts.
    None: a step that is done is final. rl takes it from ckpt.interval."""

    checkpoint_at_end: bool = False
    """The trainer saves its last step: write the orchestrator's part of that checkpoint, as checkpoint_interval always
    does. rl sets it with ckpt."""

    mesh: Path | None = None
    """Folder of a running mesh, which supplies the token and the addresses that `services` leaves out; output_dir
    defaults to run_RUN_ID in it."""

    session: str = ""
    """Names one launch: an orchestrator that restarts under the same name continues the run of its output_dir, even
    before the trainer's first step. Empty: the trainer's process decides."""

    services: ServicesConfig = ServicesConfig()
    """Addresses of the three services."""

    exchange: ExchangeConfig | None = None
    """Where rollout workers without a reachable address dial in; services.rollout may then be empty."""

    server: ServerConfig | None = None
    """Where to serve health; None means nowhere."""

    seed: Seed | None = None
    """Seed of the order of tasks and of the rollouts' sampling. None: tasks are in the order of seed 0, and training
    rollouts have no seeds, which cost vLLM a fifth of its pace at 512 in flight. Evaluations always have seeds."""

    bench: bool = False
    """Run 5 steps (or max_steps) and log a table of throughput and times, without the first step. Without `services`,
    stand-ins with made-up rollouts take their place."""

    tls: TlsConfig = TlsConfig()
    """Certificates and tokens by which this program and its peers know each other."""

    output_dir: Path = Path("outputs")
    """Folder for metrics, ledger, logs and traces."""

    readable_by: ReadableBy = "owner"
    """Who may read the files of this program: its own user, also their group, or everyone on the machine. Credentials
    stay for the owner."""

    log: LogConfig = LogConfig()
    """Logging."""

    rollout_samples: RolloutSamplesConfig | None = RolloutSamplesConfig()
    """Rollouts of each step kept to be read; None keeps none."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None means off."""

    prime_monitor: PrimeMonitorConfig | None = None
    """The Prime Intellect platform; None means off."""

    @property
    def is_found(self) -> bool:
        """Whether the trainer makes the run from its folder, whose name it has."""
        return (Layout(self.output_dir).control / ORCH_TOML).exists()

    @model_validator(mode="after")
    def _new_run_has_a_name(self) -> Self:
        if self.run is not None and not self.run_id and not self.is_found:
            raise ValueError("orchestrator.run makes a run, but orchestrator.run_id is empty; name the run there")
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        problems, sizes = [], {}
        for env in self.train.env:
            name = env.resolved_name
            size, algo = self.group_sizes[name], self.algos[name]
            if size < 2 and algo.compares:
                problems.append(
                    f"orchestrator.train.env: group_size of {name!r} must be at least 2, got {size}: an advantage"
                    f" compares the rollouts of one task ({algo.type}); use 2 or more, or leave it out"
                )
            elif env.group_size is not None:
                sizes[f"the group_size of environment {name!r}"] = size
        if not self.train.env or any(env.group_size is None for env in self.train.env):
            sizes["group_size"] = self.group_size
        for what, size in sizes.items():
            if self.batch_size % size:
                below = self.batch_size // size * size
                choices = " or ".join(str(choice) for choice in (below, below + size) if choice > 0)
                problems.append(
                    f"orchestrator.batch_size must be a multiple of {what} ({size}), got {self.batch_size};"
                    f" use {choices}"
                )
        largest = max(self.group_sizes.values(), default=self.group_size)
        if self.max_inflight_rollouts is not None and self.max_inflight_rollouts < largest:
            problems.append(
                f"orchestrator.max_inflight_rollouts must be at least group_size ({largest}),"
                f" got {self.max_inflight_rollouts}; use {self.batch_size}, or leave it unset"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @model_validator(mode="after")
    def _teachers(self) -> Self:
        mode = self.training_mode
        if self.algo is not None and mode != "rl" and self.algo.type != mode:
            raise ValueError(
                f"orchestrator.training_mode is {mode!r} but orchestrator.algo.type is {self.algo.type!r}; set one"
                " of them"
            )
        teachers = self.teachers
        for name, algo in self.algos.items():
            if algo.type in TAUGHT and teachers[name] is None:
                kind = "an engine that gives prompt logprobs (vLLM, or `inference`)"
                raise ValueError(
                    f"orchestrator.teacher is missing: {name!r} is trained by {algo.type}, which needs"
                    f" {kind if algo.type == 'opd' else 'any server of /v1/chat/completions'}; set"
                    " orchestrator.teacher.client.base_url and orchestrator.teacher.model.name"
                )
        if self.teacher is not None and teachers and not any(teachers.values()):
            raise ValueError(
                f"orchestrator.teacher is set, but no environment learns from a teacher (training_mode {mode!r}); leave"
                " it out, or set orchestrator.training_mode to opd or sft"
            )
        return self

    @model_validator(mode="after")
    def _somebody_plays(self) -> Self:
        if self.services.rollout == [] and self.exchange is None:
            raise ValueError(
                "orchestrator.services.rollout must name at least one rollout service, got none; name one, or let"
                " workers dial in with orchestrator.exchange.port"
            )
        return self

    @model_validator(mode="after")
    def _sleep_needs_idle_engines(self) -> Self:
        if self.sleep_engines and self.max_async_level > 0:
            raise ValueError(
                f"orchestrator.sleep_engines needs max_async_level 0, got {self.max_async_level}: above it engines"
                " generate while the trainer trains; set max_async_level to 0, or leave sleep_engines out"
            )
        return self

    @model_validator(mode="after")
    def _environments(self) -> Self:
        long = [env for env in self.train.env if (env.seq_len or 0) > self.seq_len]
        if long:
            raise ValueError(
                f"orchestrator.train.env: seq_len of {long[0].resolved_name!r} is {long[0].seq_len}, but a row holds"
                f" orchestrator.seq_len = {self.seq_len} tokens; lower it, or raise orchestrator.seq_len"
            )
        remedy = "give each [[orchestrator.train.env]] its own name"
        refuse_repeated_names(self.train.env, "orchestrator.train.env", remedy)
        return self

    @model_validator(mode="after")
    def _training_samples_at_random(self) -> Self:
        for env in self.train.env:
            own = env.sampling.temperature
            if (self.sampling.temperature if own is None else own) == 0:
                raise ValueError(
                    f"orchestrator.sampling.temperature of {env.resolved_name!r} is 0: a greedy sample has no"
                    " distribution to correct for; set it above 0 (evaluations may be greedy)"
                )
        return self

    @property
    def task_seed(self) -> int:
        """Of the order of tasks and of evaluations."""
        return 0 if self.seed is None else self.seed

    @property
    def sampling_seed(self) -> int | None:
        """None if none was configured."""
        if self.sampling.seed is not None or self.seed is not None:
            return self.seed if self.sampling.seed is None else self.sampling.seed
        return None if all(env.sampling.seed is None for env in self.train.env) else self.task_seed

    @property
    def algos(self) -> dict[str, AlgoConfig]:
        usual = self.algo or AlgoConfig(type="grpo" if self.training_mode == "rl" else self.training_mode)
        return {env.resolved_name: env.algo or usual for env in self.train.env}

    @property
    def teachers(self) -> dict[str, TeacherConfig | None]:
        """By training environment; None where the algorithm has none."""
        return {
            name: algo.teacher or (self.teacher if algo.type in (*TAUGHT, "custom") else None)
            for name, algo in self.algos.items()
        }

    @property
    def taught_environments(self) -> frozenset[str]:
        return frozenset(name for name, algo in self.algos.items() if algo.type == "sft")

    @property
    def teacher_services(self) -> Sequence[str]:
        """Raises RunError if it plays an environment and none is named."""
        if not self.taught_environments:
            return ()
        if self.teacher is None or self.teacher.rollout is None:
            raise RunError(
                "orchestrator.teacher.rollout must name the rollout service in which the teacher plays, got none; start"
                " `rollout` with text_samples and client.api chat_completions, or let rl start it"
            )
        return self.teacher.rollout

    @property
    def log_extras(self) -> LogExtrasConfig | None:
        """As the first destination is configured that shows samples and distributions."""
        return log_extras_of(self.wandb or self.prime_monitor, self.log)

    @property
    def group_sizes(self) -> dict[str, int]:
        return {env.resolved_name: env.group_size or self.group_size for env in self.train.env}

    @property
    def mixture(self) -> dict[str, float]:
        """Each training environment's share of the rollouts: its ratio times its group size."""
        weights = {env.resolved_name: env.ratio * self.group_sizes[env.resolved_name] for env in self.train.env}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    @property
    def last_step(self) -> int | None:
        """None runs until stopped."""
        return 5 if self.bench and self.max_steps is None else self.max_steps
