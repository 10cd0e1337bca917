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
    """What this worker is called: the same at every start, and no other worker's. Empty: the name of its host."""

    spool: Path | None = None
    """File that keeps what the orchestrator has not acknowledged; None is `exchange/NAME.sqlite` in output_dir."""

    spool_max_mib: float = Field(default=256.0, gt=0.0)
    """MiB of results that wait for the orchestrator from which on the worker takes no new groups. What it plays by then
    is still kept."""
