"""The program's TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshrl.wire.types import Sampling


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SamplingDefaults(Strict):
    """Sampling where a request leaves it open."""

    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)

    def to_wire(self) -> Sampling:
        return Sampling(**self.model_dump())


class OldEnv(Strict):
    """One environment: its module, the arguments of its load_environment, and its name in requests."""

    id: str = Field(min_length=1)
    name: str = ""
    args: dict[str, Any] = {}
    split: Literal["train", "eval"] = "train"
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def resolved_name(self) -> str:
        return self.name or self.id


class ServiceConfig(Strict):
    env: list[OldEnv] = Field(min_length=1)
    model: str
    engines: list[str] = []
    weights: str = ""
    api_key_var: str = "MESHRL_API_KEY"
    host: str = "127.0.0.1"
    port: int = Field(default=50061, ge=0, le=65535)
    insecure: bool = False
    seq_len: int = Field(default=2048, ge=2)
    max_concurrent: int = Field(default=256, ge=1)
    failover_s: float = Field(default=30.0, gt=0.0)
    drain_deadline_s: float = Field(default=60.0, ge=0.0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.engines and not self.weights:
            raise ValueError(
                "set engines to the URLs of inference engines, or weights to the address of the weight hub"
            )
        if self.host not in ("127.0.0.1", "::1", "localhost") and not self.insecure:
            raise ValueError(f"host {self.host!r} is not loopback and there is no TLS here; set insecure = true")
        names = [env.resolved_name for env in self.env]
        if len(set(names)) < len(names):
            raise ValueError(f"environments must have names of their own, got {', '.join(names)}")
        return self


def read_config(path: Path) -> ServiceConfig:
    """Raises SystemExit with one message for a file that cannot be used."""
    try:
        return ServiceConfig.model_validate(tomllib.loads(path.read_text()))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(f"meshrl-verifiers-v0: {path}: {error}") from error
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise SystemExit(f"meshrl-verifiers-v0: {path}: {found}") from error
