"""The sessions of agents at the hub: to each a queue of commands, and at its end why there are no more.

Filled by the hub's action queue, drained by the agents' Session calls.
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


class Sessions:
    """The open sessions, by lease."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, lease_id: str) -> Session:
        """A new session, in place of an older one of the same lease."""
        self.end(lease_id)
        session = self._sessions[lease_id] = Session()
        return session

    def send(self, lease_id: str, command: AgentCommand) -> bool:
        """Puts a command into a session; False where the lease has none."""
        session = self._sessions.get(lease_id)
        if session is not None:
            session.put_nowait(command)
        return session is not None

    def end(self, lease_id: str) -> None:
        """Ends the session of a lease, where there is one."""
        session = self._sessions.pop(lease_id, None)
        if session is not None:
            session.put_nowait(Ended.LEASE_OVER)

    def end_all(self) -> None:
        """Ends every session, and keeps them until their agents have left."""
        for session in self._sessions.values():
            session.put_nowait(Ended.LEASE_OVER)

    def leave(self, lease_id: str, session: Session) -> bool:
        """Forgets a session whose call is over; False where the lease has another one, or none, by now."""
        last = self._sessions.get(lease_id) is session
        if last:
            del self._sessions[lease_id]
        return last
