"""Configuration of the `inference` program; read by its main and composed by the `rl` launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import LogConfig, ModelConfig, ServerConfig, WeightBroadcastConfig


class InferenceConfig(BaseConfig):
    """One inference engine behind an OpenAI-compatible HTTP server."""

    model: ModelConfig = ModelConfig()
    """The model to serve."""

    served_model_name: str | None = None
    """Name reported by /v1/models; None means model.name. Requests may name any model: one engine serves one."""

    server: ServerConfig = ServerConfig(port=8000)
    """Where to listen. Admin routes answer loopback peers only."""

    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """Which engine runs the model; auto takes the embedded one."""

    max_model_len: int = Field(default=2048, ge=2)
    """Longest sequence in tokens, prompt and completion together."""

    max_num_seqs: int = Field(default=128, ge=1)
    """Most sequences decoded at once; the KV cache has one slot of max_model_len tokens for each."""

    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Most prompt tokens prefilled in one step; longer prompts are spread over several steps beside the decoding."""

    max_queue: int = Field(default=4096, ge=0)
    """Most requests waiting for a slot; one more is answered with 429."""

    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bound on the KV cache in bytes: it lowers the number of slots. None means half of the memory that is free."""

    torch_threads: int | None = Field(default=None, ge=1)
    """Threads for torch kernels; None means torch's own choice."""

    weight_broadcast: WeightBroadcastConfig | None = None
    """Where new weight versions come from; None means a plain server of the base model."""

    engine_id: str = ""
    """Name of this engine at the weight hub; empty means host:port."""

    engine_pool: str = ""
    """Pool this engine belongs to, for rollouts that ask for one."""

    api_key: str | None = None
    """Bearer token that /v1 and /inference requests must carry; None means none is asked for."""

    seed: int | None = None
    """Seed of requests that bring none; None means one drawn at start."""

    drain_deadline_s: float = Field(default=30.0, ge=0.0)
    """On SIGTERM, how long requests in flight may go on before they are cut."""

    request_deadline_s: float = Field(default=600.0, gt=0.0)
    """Longest time a request may take, waiting included; then it is cancelled and answered with 504."""

    output_dir: Path = Path("outputs")
    """Folder for logs and traces."""

    log: LogConfig = LogConfig()
    """Logging."""

    @model_validator(mode="after")
    def _implemented(self) -> Self:
        if self.engine == "vllm":
            raise ValueError("inference.engine 'vllm' is not available in this version; use 'embedded' or 'auto'")
        return self
