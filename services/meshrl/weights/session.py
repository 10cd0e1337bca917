"""The line from the hub to one agent: commands in order, then why there are no more. Filled by the hub's worker."""

from __future__ import annotations

import asyncio
import enum

from meshrl.wire.types import AgentCommand


class Ended(enum.Enum):
    """Why a session has no more commands."""

    HUNG_UP = enum.auto()  # by the agent
    LEASE_OVER = enum.auto()


Session = asyncio.Queue[AgentCommand | Ended]
