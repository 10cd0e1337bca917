"""Configuration of the `rollout` program; read by its main and composed by the `rl` launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import (
    Address,
    EnvConfig,
    LogConfig,
    ModelConfig,
    SamplingConfig,
    ServerConfig,
    TlsConfig,
    refuse_repeated_names,
)
from meshrl.core.private_folders import ReadableBy

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
"""vLLM's names for logprobs after and before temperature and cuts."""


class ClientConfig(BaseConfig):
    """The inference engines that sample tokens, and how to reach them."""

    base_url: list[str] = Field(default=["http://127.0.0.1:8000"])
    """Base URLs of the engines, with or without a trailing /v1. A call goes to the least loaded suitable engine. If
    `weights` names the hub, these are added to its engines, and default to none."""

    api_key_var: str = "MESHRL_API_KEY"
    """Environment variable that holds the engines' bearer token; none is sent while it is unset."""

    api_key_file: Path | None = None
    """File that holds the token instead of the variable."""

    api: Literal["generate", "chat_completions"] = "generate"
    """API of the servers of base_url. generate: engines that take and return tokens, as training needs.
    chat_completions: any OpenAI-compatible server, for evaluations; model.name is then its name for the model, no
    tokenizer is loaded, a URL with a path is used unchanged, and training rollouts are refused."""

    pool: str = ""
    """Name of the pool that these engines form; a request names it or leaves it empty."""

    logprobs_mode: LogprobsMode | None = None
    """Meaning of the engines' logprobs, for engines that do not report it: processed_logprobs are after temperature and
    truncation, raw_logprobs before, as by vLLM's --logprobs-mode, which defaults to raw_logprobs. None means unknown:
    training rollouts whose sampling changes the distribution (temperature, top_p, top_k, min_p) are then refused."""

    probe_interval_s: float = Field(default=1.0, gt=0.0)
    """Seconds between two looks at the hub's list and at each engine's version and health."""

    probe_deadline_s: float = Field(default=2.0, gt=0.0)
    """Seconds until an engine that does not answer a look counts as unreachable; also the limit for the hub's list."""

    connect_deadline_s: float = Field(default=5.0, gt=0.0)
    """Seconds to open a connection to an engine."""

    call_deadline_s: float = Field(default=600.0, gt=0.0)
    """Longest time one model call may take."""

    failover_s: float = Field(default=30.0, gt=0.0)
    """How long a model call looks for an engine before its rollout fails, and how long an engine may be silent before
    its calls move to others."""


class ExchangeLinkConfig(BaseConfig):
    """Where to dial in, and under which name."""

    address: Address
    """host:port of the orchestrator's RolloutExchange (its orchestrator.exchange.port)."""

    name: str = Field(default="", max_length=256)
    """Name of this worker: the same at every start, and unique. Empty: the name of its host."""

    spool: Path | None = None
    """File of the results that the orchestrator has not acknowledged; None is `exchange/NAME.sqlite` in output_dir."""

    spool_max_mib: float = Field(default=256.0, gt=0.0)
    """MiB of unacknowledged results above which the worker takes no new groups. Results of current ones are still
    kept."""


class RolloutConfig(BaseConfig):
    """Hosts environments, plays episodes against inference engines and scores them."""

    env: list[EnvConfig] = Field(default=[])
    """The environments to host; at least one."""

    client: ClientConfig = ClientConfig()
    """The inference engines."""

    weights: Address | None = None
    """host:port of the weight hub, whose engines are used as they come and go; None: only client.base_url."""

    model: ModelConfig = ModelConfig()
    """The policy: its name at the engines, which also locates the tokenizer."""

    tokenizer: str | None = None
    """Tokenizer to render prompts with; None takes model.name."""

    renderer: dict[str, Any] = Field(default={})
    """Renderer of chat messages: {name = "auto"} takes it from the model's name, "default" the tokenizer's own chat
    template; any other name of the renderers package, with its options, is accepted. Empty: auto, and default where
    auto fails."""

    show_rows: int = Field(default=1, ge=0, le=64)
    """First prompts that each worker logs, with the messages they are made of and their tokens."""

    sampling: SamplingConfig = SamplingConfig()
    """Default sampling, for environments and requests that set none."""

    text_samples: bool = False
    """client.api chat_completions: return the model's replies as tokens of `tokenizer`, for the policy to imitate. rl
    sets it in a teacher's rollout program."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest sequence in tokens; a model call may use the part that its prompt leaves free."""

    max_concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most rollouts running at once. auto follows the engines' reported capacity: their slots, or the number of
    rollouts of recent lengths that fit into their KV cache, plus an eighth that waits at the engines. It rises up to
    four times while rollouts spend their time outside of model calls. An engine that reports nothing counts 256."""

    max_queued: int = Field(default=4096, ge=0)
    """Most rollouts waiting for a place; a group that does not fit is refused with RESOURCE_EXHAUSTED."""

    max_concurrent_per_run: int | None = Field(default=None, ge=1)
    """Most rollouts of one run that run or wait here, if several runs share the service; more are refused. None: as
    many as of all. Free places always go to the run that has the fewest."""

    workers: int | Literal["auto"] = "auto"
    """Worker processes shared by all environments without workers of their own. auto: as many as the machine's cores
    allow, beside the other programs. 0 plays in this process, where an environment that blocks or exits takes the
    program with it."""

    standby: bool = True
    """If environments share workers, keep one more that has loaded them, to replace a lost one at once. false saves its
    memory."""

    max_memory_mib: int | None = Field(default=None, ge=64)
    """Most MiB that one worker may take beyond its use after loading the tasks; a worker above it is replaced. None is
    half of the machine's memory."""

    blocked_s: float = Field(default=3.0, gt=0.0)
    """How long an environment may block the event loop of a shared worker before the worker is replaced and the
    environment gets one of its own. A ready standby takes the worker's place after a second, and the environment
    keeps the worker."""

    max_turns: int | None = Field(default=None, ge=1)
    """Most model calls of one agent in one rollout; None sets no limit."""

    harness: str = "meshrl.environments.harness"
    """Module of the harness that plays an environment that brings none of its own."""

    drain_deadline_s: float = Field(default=60.0, ge=0.0)
    """On SIGTERM, how long running rollouts may go on before they are cancelled."""

    server: ServerConfig = ServerConfig(port=50051)
    """Where to serve RolloutService."""

    exchange: ExchangeLinkConfig | None = None
    """Dial the orchestrator, for a host without a reachable address; this program then listens on no port."""

    tls: TlsConfig = TlsConfig()
    """Certificates and tokens by which this program and its peers know each other."""

    output_dir: Path = Path("outputs")
    """Folder for logs and traces."""

    readable_by: ReadableBy = "owner"
    """Who may read what this program writes: its own user alone, also the group of the files, or everyone on the
    machine. Credentials stay for the owner."""

    log: LogConfig = LogConfig()
    """Logging."""

    vf_level: str = "warning"
    """Log level of the verifiers package; info writes two lines per rollout and costs their CPU."""

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The configured engines, whatever the hub lists; the default URL counts only without a hub."""
        given = self.weights is None or "base_url" in self.client.model_fields_set
        return tuple(self.client.base_url) if given else ()

    @model_validator(mode="after")
    def _environments(self) -> Self:
        if not self.env:
            raise ValueError(
                "rollout.env must list at least one environment, got none; add [[env]] with id = '<taskset>'"
            )
        refuse_repeated_names(self.env, "rollout.env", "give each [[env]] its own name")
        return self

    @model_validator(mode="after")
    def _workers(self) -> Self:
        if isinstance(self.workers, int) and self.workers < 0:
            raise ValueError(f"rollout.workers must be 0 or more, or 'auto', got {self.workers}")
        return self

    @model_validator(mode="after")
    def _urls(self) -> Self:
        for url in self.client.base_url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"client.base_url must hold URLs like http://127.0.0.1:8000, got {url!r}")
        return self

    @model_validator(mode="after")
    def _engines(self) -> Self:
        if self.client.api == "chat_completions" and self.weights is not None:
            raise ValueError(
                "rollout.weights names engines that serve versions of the policy, got it with client.api"
                " 'chat_completions', whose servers have none; leave one of them out"
            )
        if self.text_samples and self.client.api != "chat_completions":
            raise ValueError(
                "rollout.text_samples is for servers that give no tokens, got client.api 'generate'; leave it out"
            )
        if not self.client.base_url and self.weights is None:
            raise ValueError(
                "rollout needs engines: set client.base_url to their URLs, or weights to the address of the weight hub"
            )
        return self
