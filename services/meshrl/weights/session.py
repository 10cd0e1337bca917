"""The queue of commands from the hub to one agent, and at its end why there are no more.

Filled by the hub's action queue, drained by the agent's Session call.
"""

from __future__ import annotations

import asyncio
import enum

from meshrl.wire.types import AgentCommand


class Ended(enum.Enum):
    """Why a session has no more commands."""

    HUNG_UP = enum.auto()  # by the agent
    LEASE_OVER = enum.auto()


Session = asyncio.Queue[AgentCommand | Ended]
