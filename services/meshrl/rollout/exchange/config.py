"""Keys of a rollout worker that dials in: the section `exchange` of the `rollout` program."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshrl.core.config import BaseConfig


class ExchangeLinkConfig(BaseConfig):
    """Where to dial in, and under which name."""

    address: str = Field(min_length=1)
    """host:port of the orchestrator's RolloutExchange (its orchestrator.exchange.port)."""

    name: str = Field(default="", max_length=256)
    """Name of this worker: the same at every start, and unique. Empty: the name of its host."""

    spool: Path | None = None
    """File of the results that the orchestrator has not acknowledged; None is `exchange/NAME.sqlite` in output_dir."""

    spool_max_mib: float = Field(default=256.0, gt=0.0)
    """MiB of unacknowledged results above which the worker takes no new groups. It still keeps the results of its
    current ones."""
