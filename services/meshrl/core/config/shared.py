"""Configuration sections that several programs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator

from meshrl.client.credentials import CredentialFiles
from meshrl.core.config.base import BaseConfig
from meshrl.core.config.typed import TypedConfig, changed
from meshrl.machine.addresses import address_of, checked_address, local_address
from meshrl.wire.types import Sampling


class ServerConfig(BaseConfig):
    """Where a server listens."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs TLS, or insecure."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""

    insecure: bool = False
    """Allow a bind that is not loopback without TLS."""

    @property
    def address(self) -> str:
        return address_of(self.host, self.port)

    @property
    def local_address(self) -> str:
        """By which programs of its machine call it."""
        return local_address(self.host, self.port)


class TlsConfig(BaseConfig):
    """Credentials of a program and its peers, see SECURITY.md. A path that is None is not used."""

    folder: Path | None = None
    """Folder with some of ca.pem, cert.pem, key.pem, token and trust.sqlite, as `meshrl join` fills it. The other keys
    come first. MESHRL_TLS_FOLDER, _CA, _CERT, _KEY, _TOKEN and _TRUST are the defaults."""

    ca: Path | None = None
    """Certificates of the peers' authority, in PEM. Clients then use TLS; a server with a certificate asks callers for
    theirs."""

    cert: Path | None = None
    """This program's chain of certificates, in PEM."""

    key: Path | None = None
    """Its private key, in PEM."""

    token: Path | None = None
    """File with the token for servers that know callers by tokens."""

    trust: Path | None = None
    """For servers: file with the hashes of tokens and the revoked members (trust.sqlite)."""

    names: Literal["roles", "hosts"] = "roles"
    """Name in a server's certificate: its role (ROLE.meshrl), on any host, or its host."""

    def files(self) -> CredentialFiles:
        found = CredentialFiles() if self.folder is None else CredentialFiles.of_folder(self.folder)
        given = {"ca": self.ca, "cert": self.cert, "key": self.key, "token": self.token, "trust": self.trust}
        return replace(found, **{name: path for name, path in given.items() if path is not None})


ALL_EXPERTS = "all"
"""In model.lora.target_parameters: the experts of every layer where they can be adapted."""

EXPERT_RANK_STEP = 8
"""Ranks of experts' adapters are its multiples: grouped products on a GPU want rows of a multiple of 16 bytes."""


class ModelConfig(BaseConfig):
    """Which model, in which numbers, on which device."""

    name: str = Field(default="Qwen/Qwen3-0.6B", min_length=1)
    """Folder with a Hugging Face model, or its name on the Hugging Face hub."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Numbers to compute in. auto is float32 on a CPU, else the checkpoint's own, or bfloat16 for a float32 one."""

    device: str = "auto"
    """Torch device; auto takes a GPU if the machine has one."""

    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""


LogLevel = Literal["trace", "debug", "info", "success", "warning", "error", "critical"]


class LogConfig(BaseConfig):
    """What a program logs, and how."""

    level: LogLevel = "info"
    """Least severe level that is logged; PRIME_LOG_LEVEL is its default."""

    json_logging: bool = False
    """Write log lines as JSON objects."""

    traces_max_mib: int | None = Field(default=16, ge=1)
    """Most MiB of spans that each program keeps below traces/, half of them in PROGRAM.1.jsonl.zst. None keeps all,
    some 0.5 kB a rollout."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of each program's /metrics for Prometheus. 0 takes a free one, see metrics_targets/PROGRAM.json. None
    serves none."""

    metrics_host: str = "127.0.0.1"
    """Their address; anyone who reaches it can read them."""

    tensorboard: bool = False
    """Also write records for TensorBoard, to OUTPUT_DIR/tensorboard. Needs `pip install 'meshrl[tensorboard]'`."""

    trackio: bool = False
    """Also keep records in a Trackio database, in TRACKIO_DIR or OUTPUT_DIR/trackio. Needs
    `pip install 'meshrl[trackio]'`; `TRACKIO_DIR=OUTPUT_DIR/trackio trackio show` shows them."""

    device_hour_price: float | None = Field(default=None, ge=0.0)
    """Price of a GPU hour, in your currency, for the cost in `meshrl report` and at the end of a run."""

    @model_validator(mode="before")
    @classmethod
    def _other_spellings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        level = values.get("level")
        if not isinstance(level, str):
            return values
        return {**values, "level": {"warn": "warning", "fatal": "critical"}.get(level.lower(), level.lower())}


FEW_SAMPLES = 8
"""Rows of a table without sample_ratio."""


class LogExtrasConfig(BaseConfig):
    """Sample tables and distributions, beside the metrics."""

    samples: bool = True
    """Tables of prompts and completions with rewards and advantages."""

    distributions: bool = True
    """Distributions of rewards, advantages and entropies; in sft of the losses and entropies of tokens."""

    interval: int = Field(default=10, ge=1)
    """Steps from one to the next."""

    sample_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a step's rollouts in the table. None takes a few."""

    def rows_of(self, samples: int) -> int:
        return FEW_SAMPLES if self.sample_ratio is None else max(1, round(self.sample_ratio * samples))


class WandbConfig(BaseConfig):
    """Weights & Biases."""

    project: str = "meshrl"
    """Project of the run."""

    name: str | None = None
    """Name of the run. None lets Weights & Biases make one up."""

    group: str | None = None
    """Group of the run."""

    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""

    offline: bool = False
    """Log to disk only; WANDB_MODE of the environment comes first."""

    log_extras: LogExtrasConfig | None = LogExtrasConfig()
    """Sample tables and distributions. None means metrics only."""


class PrimeMonitorConfig(BaseConfig):
    """The Prime Intellect platform, whose dashboard shows metrics, samples and distributions."""

    run_name: str | None = None
    """Name of the run there. None takes that of wandb, or lets the platform make one up."""

    api_key_var: str = "PRIME_API_KEY"
    """Environment variable with the key; without it, the key of `prime login`."""

    team_id: str | None = None
    """Team that the run belongs to."""

    base_url: str = "https://api.primeintellect.ai/api/v1/rft"
    """Address of the platform's API."""

    log_extras: LogExtrasConfig | None = LogExtrasConfig()
    """Samples and distributions. None means metrics only."""


def log_extras_of(shown: WandbConfig | PrimeMonitorConfig | None, log: LogConfig) -> LogExtrasConfig | None:
    """By W&B's or the platform's section, else the defaults for TensorBoard and Trackio."""
    if shown is not None:
        return shown.log_extras
    return LogExtrasConfig() if log.tensorboard or log.trackio else None


GROUP_SIZE_SPELLINGS = AliasChoices("group_size", "rollouts_per_example")


Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What random numbers begin with."""


def _some_or_all(number: int) -> int:
    if number == 0:
        raise ValueError("must be 1 or more, or -1 for all tasks, got 0")
    return number


NumExamples = Annotated[int, Field(ge=-1), AfterValidator(_some_or_all)]
"""How many tasks of an environment are played; -1 takes all."""


class SamplingConfig(BaseConfig):
    """How to sample tokens. None takes the environment's value, then the engine's."""

    temperature: float | None = Field(default=None, ge=0.0)
    """Divides the logits. 0 is greedy."""

    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Sample from the smallest set of tokens with this probability."""

    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many likeliest tokens; 0 and -1 mean all."""

    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Drop tokens less likely than this times the likeliest."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one completion."""

    seed: int | None = None
    """None draws one."""

    def to_wire(self) -> Sampling:
        return Sampling(**dict(self))


class StageDeadlinesConfig(BaseConfig):
    """Limits in seconds for a rollout of one environment; its error names the stage. None leaves the request's own."""

    setup_s: float | None = Field(default=None, gt=0.0)
    """Until its first model call: runtime, set-up of task and harness, tool servers."""

    turn_s: float | None = Field(default=None, gt=0.0)
    """One model call, or the harness's work between two of them, such as a tool call."""

    scoring_s: float | None = Field(default=None, gt=0.0)
    """The stages after the last model call: finalize, rewards and metrics."""

    rollout_s: float | None = Field(default=None, gt=0.0)
    """The whole rollout."""

    blocked_s: float = Field(default=30.0, gt=0.0)
    """How long the environment's code may block a worker of its own before that is replaced. For shared workers see
    rollout.blocked_s."""


class EnvConfig(BaseConfig):
    """One environment: a taskset, its options and its share of the tasks."""

    id: str = Field(min_length=1)
    """Taskset: a name that verifiers knows or a Python module. A resumed run draws an infinite one again up to its
    place, unless it has a method task_at(index)."""

    name: str | None = Field(default=None, min_length=1)
    """Name in metrics and requests. None means the id."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the taskset."""

    ratio: float = Field(default=1.0, gt=0.0)
    """Share of tasks drawn from this environment, relative to the others'."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling in this environment. None takes the program's value."""

    workers: int | None = Field(default=None, ge=1)
    """Worker processes for this environment alone. None uses the shared ones."""

    isolated: bool = False
    """Play it in workers of its own: `workers`, by default one. One that ends or blocks a shared worker gets its own
    anyway."""

    max_memory_mib: int | None = Field(default=None, ge=64)
    """Most MiB that its worker, then one of its own, may take beyond its use after loading before it is replaced. None
    takes rollout.max_memory_mib."""

    deadlines: StageDeadlinesConfig = StageDeadlinesConfig()
    """Seconds that a rollout may take, as a whole and in each stage."""

    part: Literal["train", "eval"] = "train"
    """Folder of its logs, below logs/envs; rl sets it to where the environment is listed."""

    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens, at most the program's own seq_len, which None takes. A model call may use what its
    prompt leaves free, and training cuts longer ones."""

    @property
    def resolved_name(self) -> str:
        return self.name or self.id


def refuse_repeated_names(envs: Sequence[EnvConfig], keys: str, remedy: str) -> None:
    """Raises ValueError, whose sentence `remedy` ends."""
    names = [env.resolved_name for env in envs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{keys} must have distinct names, got {', '.join(repeated)} more than once; {remedy}")


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _without_repeats(addresses: list[str]) -> list[str]:
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"must name each service once, got {', '.join(addresses)}")
    return addresses


LOCAL = "local"
"""In a list of rollout services: the one that rl starts."""

MOST_CONNECTIONS = 96
"""For one stream. 100 Mb/s at 100 ms and 1% of loss are full with so many of `cubic`; 48 took 61 Mb/s."""

Address = Annotated[str, AfterValidator(checked_address)]
"""host:port of a server."""

_Listed = Annotated[str, AfterValidator(lambda address: address if address == LOCAL else checked_address(address))]

Addresses = Annotated[
    list[_Listed], Field(min_length=1), BeforeValidator(_one_or_more), AfterValidator(_without_repeats)
]
"""One or more servers of the same service; one may be given as text."""

AddressesOrNone = Annotated[list[_Listed], BeforeValidator(_one_or_more), AfterValidator(_without_repeats)]
"""The same, or an empty list."""


class WeightBroadcastConfig(TypedConfig):
    """How weight versions travel from the trainer to engines."""

    section: ClassVar = "weight_broadcast"

    of_types: ClassVar = {
        "broadcast_dir": ("auto", "filesystem"),
        "bucket_mib": ("auto", "nccl"),
        "host": ("auto", "nccl"),
    }

    type: Literal["auto", "filesystem", "nccl", "stream"] = "auto"
    """filesystem: files that both sides see. nccl: broadcast from device to device. stream: chunks over gRPC. auto: the
    best for the engines at the hub when the trainer starts."""

    address: Address = "127.0.0.1:50053"
    """Address of the weight hub."""

    chunk_bytes: int = Field(default=2 * 2**20, ge=4096, le=32 * 2**20)
    """At most the hub's limit."""

    broadcast_dir: str | None = None
    """filesystem: folder for versions. None: /dev/shm if hub and engines are on this host and three versions fit, else
    output_dir/broadcasts."""

    bucket_mib: int = Field(default=256, ge=1, le=4096)
    """nccl: MiB of a bucket of tensors; an engine holds two."""

    transfer_deadline_s: float = Field(default=60.0, gt=0.0)
    """nccl: seconds without progress after which a broadcast is abandoned. Engines then fetch the version or get the
    next."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """nccl: the one address at which the trainer listens for engines, on the network between their hosts."""

    deltas: Literal["auto", "off"] = "auto"
    """auto publishes the changes since the previous version if they have less than half of the full version's bytes,
    with nccl only over a link slower than the work on them. off publishes every version in full."""

    anchor_every: int = Field(default=32, ge=1)
    """After so many deltas a version goes in full. Joining engines fetch that and one delta (stream, filesystem)."""

    relays: list[Address] = Field(default_factory=list)
    """stream: relays of this site (`weights --upstream`). An engine fetches from the fastest that answers, before the
    hub."""

    connections: int = Field(default=MOST_CONNECTIONS, ge=1, le=128)
    """stream: most connections over which an engine fetches, or a trainer sends to a far hub; fewer where more bring
    nothing."""

    max_mbps: float = Field(default=0.0, ge=0.0)
    """stream: most megabits per second, on average, of an engine or trainer. 0 is no limit."""

    stall_s: float = Field(default=120.0, gt=0.0)
    """stream: seconds without a byte after which a fetch or upload is abandoned; shorter breaks of the link do no
    harm."""

    lora_adapter_only: bool = True
    """With model.lora, publish the adapter alone instead of merged weights."""

    probe_tokens: int = Field(default=64, ge=0, le=1024)
    """Tokens of a fixed prompt that the trainer and each engine score with each version, which shows that the engine
    computes with it. 0: none."""

    max_probe_error: Annotated[float, Field(gt=0.0)] | Literal["auto"] = "auto"
    """Mean distance of an engine's logprobs of the probe from the trainer's, in nats, above which it loads the version
    anew. auto: 8 times the largest of its first 8 versions, at least 0.05; before the fourth half of the spread of
    the probe's logprobs."""

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        self.refuse_foreign()
        if self.deltas == "off" and changed(self, ["anchor_every"]):
            raise ValueError(
                "weight_broadcast.anchor_every is about deltas, and weight_broadcast.deltas is off; leave one of them"
                " out"
            )
        if not self.probe_tokens and changed(self, ["max_probe_error"]):
            raise ValueError(
                "weight_broadcast.max_probe_error is about probes, and weight_broadcast.probe_tokens is 0; leave one of"
                " them out"
            )
        return self


class ServicesConfig(BaseConfig):
    """Addresses of the three services."""

    rollout: AddressesOrNone = Field(default=["127.0.0.1:50051"])
    """RolloutService, one or several; an environment may be at some of them only. Empty where workers dial in
    (`exchange`)."""

    trainer: Address = "127.0.0.1:50052"
    """TrainerService."""

    weights: Address = "127.0.0.1:50053"
    """WeightSync."""

    @model_validator(mode="after")
    def _addresses_only(self) -> Self:
        if LOCAL in self.rollout:
            raise ValueError(
                f"services.rollout: {LOCAL!r} stands for the program that rl starts; give its host:port here"
            )
        return self
