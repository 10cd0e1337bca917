"""Configuration of the `inference` program; `rl` composes it, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import LogConfig, ModelConfig, Seed, ServerConfig, TlsConfig, WeightBroadcastConfig
from meshrl.core.private_folders import ReadableBy
from meshrl.machine.addresses import ANY_HOST
from meshrl.prime_rl.keys import VLLM_ARGUMENTS
from meshrl.wire.values import JsonObject

VLLM_KEYS = (
    "tensor_parallel_size", "data_parallel_size", "data_parallel_size_local", "data_parallel_address",
    "data_parallel_rpc_port", "data_parallel_start_rank", "gpu_memory_utilization", "enforce_eager",
)  # fmt: skip
"""Keys of the vLLM engine alone, under vLLM's names."""

BOTH_ENGINES = ("max_num_seqs", "max_num_batched_tokens")
"""Keys of both engines, passed to vLLM under these names when they are set."""

ROUTER_DTYPE = "meshrl_router_dtype"
"""Key of vLLM's additional_config for our routers, and so part of the hash of what vLLM compiles."""

AUTO_MODEL_LEN = 2048
SHARED_GPU_UTILIZATION = 0.5
DEFAULT_LORA_RANK = 16
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can be started for."""


class EngineBenchConfig(BaseConfig):
    """Measures the engine on made-up requests and prints a table; nothing is served."""

    requests: int = Field(default=256, ge=1)
    """Measured requests."""

    concurrency: int | None = Field(default=None, ge=1)
    """Requests in flight; None means as many as the engine has slots."""

    group_size: int = Field(default=8, ge=1)
    """Requests with the same prompt."""

    prompt_tokens: int = Field(default=256, ge=1)
    """Tokens of a prompt."""

    min_tokens: int = Field(default=512, ge=1)
    """Fewest tokens of a completion; their number is drawn evenly up to max_tokens."""

    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of a completion."""

    json_path: Path | None = None
    """File for the numbers as JSON; None means bench/inference.json in output_dir."""


class InferenceConfig(BaseConfig):
    """One inference engine behind an OpenAI-compatible HTTP server."""

    model: ModelConfig = ModelConfig()
    """The model to serve."""

    served_model_name: str | None = None
    """Name reported by /v1/models; None means model.name. Requests may name any model."""

    server: ServerConfig = ServerConfig(port=8000)
    """Where to listen. Admin routes require the API key, or without one a loopback peer that names this host."""

    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """Engine that runs the model; auto takes vLLM where it is installed and there is a GPU, else the embedded one."""

    vllm: dict[str, Any] = Field(default_factory=dict)
    """Other engine arguments of vLLM, under its names with underscores; checked against the installed vLLM."""

    python: Path | None = None
    """Interpreter that runs this program, such as that of an environment with vLLM; it must have meshrl. None means the
    one of its start, or of `rl`."""

    max_model_len: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Longest sequence in tokens, prompt and completion together. auto: 2048, or the model's positions if those are
    fewer."""

    max_num_seqs: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most sequences decoded at once. auto: vLLM on a GPU takes as many as its KV cache holds for model and context, up
    to 1024, on a CPU 64; the embedded engine, whose KV cache has a slot of max_model_len tokens for each, 128. The log
    has the number and the reason."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens computed in one step; longer prompts take several. None means 8192 for vLLM on a GPU of 70 GiB and
    more, else 2048; 2048 prompt tokens for the embedded engine."""

    max_prompt_bytes: int | None = Field(default=None, ge=1)
    """Longest text of a prompt, in bytes of UTF-8, the chat template's included; longer ones get a 400. None means 16
    for each token of max_model_len, and at least 65536."""

    trust_request_chat_template: bool = False
    """Run a chat template that a request brings (`chat_template`, as in vLLM). It is a program: only for clients that
    may run code on this machine."""

    renderer: dict[str, Any] = Field(default_factory=dict)
    """Renderer of the model's family, which parses tool calls and reasoning out of replies to /v1/chat/completions:
    {name = "qwen3"} or another name of the renderers package with its options; "default" with tool_parser and
    reasoning_parser for models that have none. Empty: by model.name if that is known; else replies are text, and
    requests with tools are refused."""

    max_queue: int = Field(default=4096, ge=0)
    """Most requests waiting for a slot; one more gets a 429."""

    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the KV cache. None means the rest of gpu_memory_utilization; for the embedded engine, whose slots it
    bounds, half of the free memory."""

    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """vLLM: GPUs that one copy of the model is split over."""

    data_parallel_size: int | None = Field(default=None, ge=1)
    """vLLM: copies of the model, over all nodes."""

    data_parallel_size_local: int | None = Field(default=None, ge=0)
    """vLLM: copies of the model on this node; None means all."""

    data_parallel_address: str | None = None
    """vLLM: address of the node with the first of copies on several nodes."""

    data_parallel_rpc_port: int | None = Field(default=None, ge=1, le=65535)
    """vLLM: port at data_parallel_address where the nodes meet."""

    data_parallel_start_rank: int | None = Field(default=None, ge=0)
    """vLLM: number of this node's first copy."""

    headless: bool = False
    """vLLM: only run this node's copies for the node at data_parallel_address, which serves."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] = "auto"
    """vLLM: share of the GPU's memory for weights, the second copy that versions come into, activations and KV cache.
    auto is 0.92, less on a small GPU, and 0.5 on one that a trainer shares."""

    enforce_eager: bool | None = None
    """vLLM: run without CUDA graphs and compilation: slower, but up sooner."""

    head_dtype: Literal["float32", "model"] = "float32"
    """vLLM: type of the logits. float32 sums them as the trainer does, which lowers the mismatch of a model in
    bfloat16; model rounds them to the model's type, as a quantized lm_head needs."""

    router_dtype: Literal["float32", "model"] = "model"
    """vLLM: type of the logits of a mixture's routers, the same as trainer.model.router_dtype: float32 sums without
    rounding, model leaves it to the family."""

    share_compiled: bool = False
    """vLLM on a GPU: share what it compiles at its start through the weight hub with engines of the same model, options
    and GPU. They run it as code: only where all engine hosts of the run trust each other, and by a hub whose
    certificate the run's authority vouches for."""

    lora_rank: int | None = Field(default=None, ge=1, le=512)
    """Versions are LoRA adapters of at most this rank; None means whole models. vLLM needs it at its start, the
    embedded engine takes both. `rl` sets it."""

    enable_lora: bool | None = None
    """Serve adapters, each run's to its own requests. vLLM then takes no whole models. None: with a lora_rank."""

    max_loras: int = Field(default=2, ge=1)
    """Adapters that the engine holds and one batch may mix: twice the runs, as a replaced version stays until its last
    request ends. vLLM reserves GPU memory for each."""

    max_cpu_loras: int | None = Field(default=None, ge=1)
    """vLLM: adapters in the host's memory, of which the GPU has max_loras; by default as many."""

    enable_return_routed_experts: bool = False
    """Mixtures of experts: keep each token's experts for requests that ask for them, as router replay does. `rl` sets
    it with `trainer.enable_router_replay`."""

    share_gpu: bool = False
    """A trainer works on the same GPU: gpu_memory_utilization is 0.5 unless given. `rl` sets it."""

    sleep_while_training: bool = False
    """vLLM on a GPU that the trainer shares, at max_async_level 0: while the trainer trains, weights go to host memory
    and the KV cache is dropped; the next version or request takes the memory again. `rl` has the trainer give its
    cached memory back after each step."""

    torch_threads: int | None = Field(default=None, ge=1)
    """Threads for torch kernels; None means the engine's choice. vLLM on a CPU then runs an unsplit model inside its
    scheduler's process, which leaves the other cores alone."""

    weight_broadcast: WeightBroadcastConfig | None = None
    """Where new weight versions come from; None means a plain server of the base model."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+$")
    """Where the run's other programs reach this engine, if not at server.host: https://NAME:PORT by a name in its
    certificate, or a proxy."""

    engine_id: str = ""
    """Name of this engine at the weight hub; empty means the host:port at which it is reached."""

    engine_pool: str = ""
    """Pool of this engine, for rollouts that ask for one."""

    api_key: SecretStr | None = None
    """Bearer token that every request must carry, except those for health, version and metrics. It is in no file and no
    log, and `rl` passes it on. A command line shows it to other users of the machine, so prefer the next two keys,
    which None reads. Without any of the three no token is required."""

    api_key_file: Path | None = None
    """File that holds the token."""

    api_key_var: str = Field(default="MESHRL_API_KEY", min_length=1)
    """Environment variable that holds it, if neither of the two above is set."""

    seed: Seed | None = None
    """Seed of requests that bring none; None means one drawn at start."""

    drain_deadline_s: float = Field(default=30.0, ge=0.0)
    """On SIGTERM, how long requests in flight may go on before they are cut."""

    request_deadline_s: float = Field(default=600.0, gt=0.0)
    """Longest time of a request, waiting included; then it is cancelled with 504."""

    bench: EngineBenchConfig | None = None
    """Measure the engine on made-up requests and end."""

    tls: TlsConfig = TlsConfig()
    """Certificates and tokens by which this program and its peers know each other."""

    output_dir: Path = Path("outputs")
    """Folder for logs and traces."""

    readable_by: ReadableBy = "owner"
    """Who may read what this program writes: its own user, also the group of the files, or everyone on the machine.
    Credentials stay for the owner."""

    log: LogConfig = LogConfig()
    """Logging."""

    @field_validator("vllm", mode="before")
    @classmethod
    def _underscores(cls, given: object) -> object:
        return {str(key).replace("-", "_"): value for key, value in given.items()} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _each_key_once(self) -> Self:
        problems = [
            f"inference.vllm.{key} is spelled inference.{VLLM_ARGUMENTS[key]} here; set that one"
            for key in self.vllm
            if key in VLLM_ARGUMENTS
        ]
        problems += [
            f"inference.{key} and inference.vllm.{key} are both set; keep only inference.{key}"
            for key in self.vllm
            if key in (*VLLM_KEYS, *BOTH_ENGINES) and self._own(key) is not None
        ]
        if self.router_dtype == "float32" and "additional_config" in self.vllm:
            problems.append("inference.router_dtype is passed on in vLLM's additional_config; leave one of the two out")
        overrides = self.vllm.get("hf_overrides", {})
        if "head_dtype" in overrides:
            problems.append("inference.vllm.hf_overrides.head_dtype is spelled inference.head_dtype here; set that one")
        if self.sleep_while_training and self.vllm.get("enable_sleep_mode") is False:
            problems.append(
                "inference.sleep_while_training needs vLLM's sleep mode, but inference.vllm.enable_sleep_mode is off;"
                " leave inference.vllm.enable_sleep_mode out"
            )
        if self.api_key is not None and self.api_key_file is not None:
            problems.append("inference.api_key and inference.api_key_file are both set; keep one")
        if self.engine == "embedded" and self.vllm_only:
            problems.append(only_vllm(self.vllm_only))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def hosts(self) -> tuple[str, ...]:
        published = "" if self.url is None else urlsplit(self.url).hostname or ""
        return tuple(host for host in (self.server.host, published) if host and host not in ANY_HOST)

    @property
    def unpublished(self) -> str:
        """Why the hub has no address of this engine for others; empty if it has one."""
        if self.url is not None or self.server.host not in ANY_HOST:
            return ""
        return (
            f"inference.server.host is {self.server.host!r}, all addresses of this machine, and the weight hub gives"
            " callers one; set it to the address at which they reach this machine, or add inference.url with"
            " that address, as in https://ADDRESS:PORT"
        )

    @property
    def vllm_only(self) -> tuple[str, ...]:
        own = [key for key in VLLM_KEYS if self._own(key) is not None]
        own += [key for key in ("headless", "sleep_while_training", "share_compiled") if getattr(self, key)]
        own += ["head_dtype"] if self.head_dtype == "model" else []
        own += ["router_dtype"] if self.router_dtype == "float32" else []
        return (*own, *(f"vllm.{key}" for key in self.vllm))

    @property
    def imports_vllm_ahead(self) -> bool:
        """Whether the engine may be vLLM on a GPU, whose processes a fork server starts."""
        on_gpu = self.engine != "embedded" and not self.model.device.startswith("cpu")
        return on_gpu and not self.vllm_argument("numa_bind")  # which takes a new interpreter for each

    @property
    def takes_whole_versions(self) -> bool:
        """Whether vLLM has a second copy of the weights, which adapters do not need."""
        adapters = self._takes_adapters or bool(self.vllm_argument("enable_lora"))
        return self.weight_broadcast is not None and not adapters

    @property
    def loads_as_trainers(self) -> bool:
        """Whether the model's folder must be one that the trainers take: for whole versions, unless vLLM loads it in a
        format of its own."""
        return self.takes_whole_versions and self.vllm_argument("load_format") in (None, "auto")

    @property
    def _takes_adapters(self) -> bool:
        return self.lora_rank is not None if self.enable_lora is None else self.enable_lora

    def vllm_arguments(self) -> JsonObject:
        """vLLM's engine arguments: the keys set here and in the `vllm` table, and the model."""
        given = {key: self._own(key) for key in (*VLLM_KEYS, *BOTH_ENGINES)}
        if self.share_gpu and "gpu_memory_utilization" not in self.vllm and given["gpu_memory_utilization"] is None:
            given["gpu_memory_utilization"] = SHARED_GPU_UTILIZATION
        if self.sleep_while_training:
            given["enable_sleep_mode"] = True
        if self._takes_adapters:
            rank = next(rank for rank in VLLM_LORA_RANKS if rank >= (self.lora_rank or DEFAULT_LORA_RANK))
            given |= {"enable_lora": True, "max_loras": self.max_loras, "max_lora_rank": rank}
            given["max_cpu_loras"] = self.max_cpu_loras
        if self.enable_return_routed_experts:
            given["enable_return_routed_experts"] = True
        given |= {
            "model": self.model.name,
            "dtype": self.model.dtype,
            "trust_remote_code": self.model.trust_remote_code,
            "served_model_name": self.served_model_name,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "seed": self.seed,
        }
        overrides = {"head_dtype": self.head_dtype, **self.vllm.get("hf_overrides", {})}
        if self.router_dtype == "float32":
            given["additional_config"] = {ROUTER_DTYPE: self.router_dtype}
        return {
            **{key: value for key, value in given.items() if value is not None},
            **self.vllm,
            "hf_overrides": overrides,
        }

    def gpus_per_engine(self) -> int:
        """GPUs of this node that one such program takes."""
        sizes = [self._size("tensor_parallel_size"), self._size("pipeline_parallel_size")]
        local = self.vllm_argument("data_parallel_size_local")
        copies = self._size("data_parallel_size") if local is None else int(local)
        return max(1, copies) * sizes[0] * sizes[1]

    def vllm_argument(self, key: str) -> Any:
        own = self._own(key)
        return self.vllm.get(key) if own is None else own

    def _own(self, key: str) -> Any:
        value = getattr(self, key, None)
        return None if value == "auto" else value

    def _size(self, key: str) -> int:
        return int(self.vllm_argument(key) or 1)


def only_vllm(keys: Sequence[str]) -> str:
    named = ", ".join(f"inference.{key}" for key in keys)
    out = "it" if len(keys) == 1 else "them"
    return f"the embedded engine has no {named}; leave {out} out, or set inference.engine = 'vllm'"
