"""Configuration of the `weights` program; read by its main and composed by the `rl` launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import MOST_CONNECTIONS, Address, LogConfig, ServerConfig, TlsConfig
from meshrl.core.private_folders import ReadableBy


class WeightsConfig(BaseConfig):
    """The hub that moves weight versions from a trainer to engines."""

    server: ServerConfig = ServerConfig(port=50053)
    """Where to listen."""

    tls: TlsConfig = TlsConfig()
    """Certificates and tokens by which this program and its peers know each other."""

    output_dir: Path = Path("outputs")
    """Folder of the run, shared by its programs: logs, traces and, by default, the spool."""

    readable_by: ReadableBy = "owner"
    """Who may read what this program writes: its own user, also the group of the files, or everyone on the machine.
    Credentials stay for the owner."""

    enrollment_port: int | None = Field(default=None, ge=0, le=65535)
    """Port at which hosts join the run (`meshrl join`); needs the run's authority in output_dir (`meshrl run init`).
    None disables joining."""

    upstream: Address | None = None
    """Address of the run's hub, host:port, for a relay: it brings versions over the WAN once for the engines that name
    it in weight_broadcast.relays. None is the hub itself."""

    connections: int = Field(default=MOST_CONNECTIONS, ge=1, le=128)
    """Most connections over which a relay fetches. It opens them while the rate grows."""

    max_mbps: float = Field(default=0.0, ge=0.0)
    """Most megabits per second that a relay fetches on average. 0 is no limit."""

    stall_s: float = Field(default=120.0, gt=0.0)
    """Seconds without a byte after which a relay gives a fetch up."""

    raw_port: int | None = Field(default=0, ge=0, le=65535)
    """Port for raw bytes of large versions over HTTP, with less work than over gRPC, which carries them where this port
    cannot be reached. 0 takes a free one. None disables it, as TLS and tokens do."""

    spool_dir: Path | None = None
    """Folder for the durable log and streamed bytes. None means output_dir/weight_hub."""

    lease_s: float = Field(default=10.0, ge=0.2)
    """Seconds without a heartbeat after which an engine is dropped from the pool; agents beat at a third of it."""

    max_chunk_bytes: int = Field(default=4 * 2**20, ge=4096, le=32 * 2**20)
    """Largest chunk taken or sent, in bytes; 1 to 4 MiB is fastest."""

    keep_versions: int = Field(default=2, ge=1)
    """Committed versions whose bytes are kept; anything still in progress is kept besides."""

    min_engines: int = Field(default=1, ge=1)
    """Engines that must have prepared the first version of a hub before it is committed."""

    commit_deadline_s: float = Field(default=20.0, gt=0.0)
    """Seconds an engine may take to apply a decided version before it is ejected from the pool."""

    engines: list[str] = Field(default_factory=list)
    """Base URLs of inference servers that run already, with or without a trailing /v1. Each is called at its admin
    route /follow_hub until it follows this hub, and again after a loss. Engines that were started for this hub need not
    be listed; rl lists those of orchestrator.client.base_url."""

    engine_api_key_var: str = Field(default="MESHRL_API_KEY", min_length=1)
    """Environment variable that holds the key of these servers; none is sent while it is unset."""

    engine_api_key_file: Path | None = None
    """File that holds the key instead of the variable."""

    verify_files: Literal["digests", "sizes"] = "digests"
    """Checks at sealing a version made of files: sizes, or every digest as well. Agents always check digests."""

    log: LogConfig = LogConfig()
    """Logging."""

    @field_validator("engines")
    @classmethod
    def _base_urls(cls, given: list[str]) -> list[str]:
        wrong = [url for url in given if not url.startswith(("http://", "https://"))]
        if wrong:
            raise ValueError(f"weights.engines must hold URLs like http://127.0.0.1:8000, got {wrong[0]!r}")
        return list(dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in given))
