"""Configuration of the `rollout` program, which `rl` composes too."""

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
    """URLs of the engines, with or without a trailing /v1. A call goes to the least loaded suitable engine. With
    `weights`, these are added to the hub's engines, and default to none."""

    api_key_var: str = "MESHRL_API_KEY"
    """Environment variable with the engines' bearer token; unset sends none."""

    api_key_file: Path | None = None
    """File with the token, instead of the variable."""

    api: Literal["generate", "chat_completions"] = "generate"
    """API of the servers of base_url. generate: engines that take and return tokens, as training needs.
    chat_completions: any OpenAI-compatible server, for evaluations; model.name is then its name for the model, no
    tokenizer is loaded, a URL with a path is used unchanged, and training rollouts are refused."""

    pool: str = ""
    """Name of these engines' pool; a request names it or leaves it empty."""

    logprobs_mode: LogprobsMode | None = None
    """Meaning of the logprobs of engines that do not report it: processed_logprobs are after temperature and
    truncation, raw_logprobs before, as by vLLM's --logprobs-mode (default raw_logprobs). None: unknown, and training
    rollouts whose sampling changes the distribution (temperature, top_p, top_k, min_p) are refused."""

    probe_interval_s: float = Field(default=1.0, gt=0.0)
    """Seconds between two looks at the hub's list and at each engine."""

    probe_deadline_s: float = Field(default=2.0, gt=0.0)
    """Seconds until an engine that does not answer a look counts as unreachable; also the limit for the hub's list."""

    connect_deadline_s: float = Field(default=5.0, gt=0.0)
    """Seconds to open a connection to an engine."""

    call_deadline_s: float = Field(default=600.0, gt=0.0)
    """Seconds that one model call may take."""

    failover_s: float = Field(default=30.0, gt=0.0)
    """Seconds that a model call looks for an engine, and that an engine may be silent before its calls move to
    others."""

    @model_validator(mode="after")
    def _urls(self) -> Self:
        for url in self.base_url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"client.base_url must hold URLs like http://127.0.0.1:8000, got {url!r}")
        return self


class ExchangeLinkConfig(BaseConfig):
    """Where to dial in, and under which name."""

    address: Address
    """host:port of the orchestrator's RolloutExchange (its orchestrator.exchange.port)."""

    name: str = Field(default="", max_length=256)
    """Name of this worker, unique and the same at every start. Empty: the name of its host."""

    spool: Path | None = None
    """File of the results that the orchestrator has not acknowledged. None: `exchange/NAME.sqlite` in output_dir."""

    spool_max_mib: float = Field(default=256.0, gt=0.0)
    """MiB of unacknowledged results above which the worker takes no new groups; results of current ones are still
    kept."""


class PlayConfig(BaseConfig):
    """How environments are played: keys of `rollout`, `eval` and `synthesize`."""

    model: ModelConfig = ModelConfig()
    """The model: its name at the servers, which also locates the tokenizer."""

    tokenizer: str | None = None
    """Tokenizer of prompts. None: model.name."""

    renderer: dict[str, Any] = Field(default={})
    """Renderer of chat messages: {name = "auto"} takes it from the model's name, "default" the tokenizer's own chat
    template; or another name of the renderers package, with its options. Empty: auto, and default where auto fails."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of environments and requests that set none."""

    max_concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most rollouts at once. auto follows the engines' reported capacity: their slots, or the rollouts of recent
    lengths that fit into their KV cache, and an eighth more; up to four times as many while rollouts spend their time
    outside of model calls. An engine that reports nothing counts 256."""

    max_turns: int | None = Field(default=None, ge=1)
    """Most model calls of one agent in one rollout. None: no limit."""

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Worker processes of all environments without workers of their own. auto: as many as the cores allow, beside the
    other programs. 0 plays in this process, which an environment that blocks or exits takes with it."""

    harness: str = "meshrl.environments.harness"
    """Harness module of an environment that brings none."""

    readable_by: ReadableBy = "owner"
    """Who may read this program's files: its own user, also the group of the files, or everyone on the machine.
    Credentials stay for the owner."""

    log: LogConfig = LogConfig()
    """Logging."""

    vf_level: str = "warning"
    """Log level of the verifiers package; info writes two lines per rollout."""


class RolloutConfig(PlayConfig):
    """Hosts environments, plays episodes against inference engines and scores them."""

    env: list[EnvConfig] = Field(default=[])
    """The environments; at least one."""

    client: ClientConfig = ClientConfig()
    """The inference engines."""

    weights: Address | None = None
    """host:port of the weight hub, whose engines are used as they come and go. None: only client.base_url."""

    show_rows: int = Field(default=1, ge=0, le=64)
    """First prompts that each worker logs, with their messages and tokens."""

    text_samples: bool = False
    """client.api chat_completions: return the model's replies as tokens of `tokenizer`, for the policy to imitate. rl
    sets it for a teacher."""

    seq_len: int = Field(default=2048, ge=2)
    """Tokens of the longest sequence; a model call may use the part that its prompt leaves free."""

    max_queued: int = Field(default=4096, ge=0)
    """Most rollouts that wait for a place; a group that does not fit is refused with RESOURCE_EXHAUSTED."""

    max_concurrent_per_run: int | None = Field(default=None, ge=1)
    """Most rollouts of one run that run or wait, if several runs share the service; more are refused. None: no limit of
    its own."""

    standby: bool = True
    """If environments share workers, keep one more that has loaded them, to replace a lost one at once."""

    max_memory_mib: int | None = Field(default=None, ge=64)
    """Most MiB that a worker may take beyond its use after loading the tasks; one above it is replaced. None: half of
    the machine's memory."""

    blocked_s: float = Field(default=3.0, gt=0.0)
    """Seconds that an environment may block a shared worker's event loop before the worker is replaced and the
    environment gets one of its own. A ready standby takes over after a second, and the environment keeps the worker."""

    drain_deadline_s: float = Field(default=60.0, ge=0.0)
    """Seconds that running rollouts may go on after SIGTERM."""

    server: ServerConfig = ServerConfig(port=50051)
    """Where to serve RolloutService."""

    exchange: ExchangeLinkConfig | None = None
    """Dial the orchestrator, from a host without a reachable address; the program then listens on no port."""

    tls: TlsConfig = TlsConfig()
    """Certificates and tokens by which this program and its peers know each other."""

    output_dir: Path = Path("outputs")
    """Folder for logs and traces."""

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The configured engines; the default URL counts only without a hub."""
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
