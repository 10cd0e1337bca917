"""The section `exchange` of the orchestrator."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from meshrl.core.config.shared import ServerConfig


class ExchangeConfig(ServerConfig):
    """Where rollout workers without a reachable address dial in."""

    port: int = Field(default=50054, ge=0, le=65535)
    """Port to bind; 0 takes a free one, which the log names."""

    lease_s: float = Field(default=60.0, gt=0.0)
    """Seconds for which a silent worker keeps its groups. Then others play them, and its late results are dropped."""

    heartbeat_s: float = Field(default=5.0, gt=0.0)
    """Seconds between signs of life. After three missing ones the stream is ended; the worker dials again."""

    window: int = Field(default=256, ge=1)
    """Rollouts that a worker may send ahead of the orchestrator's bookkeeping."""

    wait_s: float = Field(default=1800.0, gt=0.0)
    """Seconds that the run waits for a host of an environment before it ends."""

    workers: list[str] = Field(default=[])
    """Names of workers that the run waits for, up to deadlines.startup_s, before it begins. Empty: it begins once each
    environment has a host. Others may join later."""

    @model_validator(mode="after")
    def _lease_outlasts_silence(self) -> Self:
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"orchestrator.exchange.lease_s must be at least three times heartbeat_s ({self.heartbeat_s:g}), got"
                f" {self.lease_s:g}; use {3 * self.heartbeat_s:g} or more, or lower heartbeat_s"
            )
        return self
