"""Runs the agent for the hub that an engine follows: the one of its configuration, or one that called POST /follow_hub.

An engine follows one hub at a time, and does not leave a present hub for another.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from loguru import logger

from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.credentials import TokenCredentials
from meshrl.core.telemetry.waits import Waits
from meshrl.core.waiting import Pulse
from meshrl.inference.agent.agent import Membership, WeightAgent
from meshrl.inference.agent.ahead import VersionAhead
from meshrl.inference.engine import Engine
from meshrl.wire.errors import MeshError, Reason

REACH_S = 5.0
LEAVE_S = 90.0  # an apply that is under way comes to its end first
CLOSE_S = 5.0
AWAY_S = 120.0  # a hub that is started again by then is followed on


@dataclass(frozen=True, kw_only=True)
class _Following:
    hub: str
    token: str
    agent: WeightAgent
    task: asyncio.Task[None]
    leave: asyncio.Event


class HubFollower:
    """Runs at most one agent beside an engine, from `run` on until its `stop` is set."""

    def __init__(
        self,
        engine: Engine,
        membership: Membership,
        *,
        url: str = "",
        away_s: float = AWAY_S,
        waits: Waits | None = None,
        ahead: VersionAhead | None = None,
    ) -> None:
        """url, ahead: as of `WeightAgent`, for the configured hub; away_s: the same for one that called."""
        self._waits, self._ahead = waits or Waits(), ahead
        self._engine, self._membership, self._url, self._away_s = engine, membership, url, away_s
        self._address = ""
        self._following: _Following | None = None
        self._changing = asyncio.Lock()
        self._changed = Pulse()

    @property
    def hub(self) -> str | None:
        return None if self._following is None else self._following.hub

    @property
    def connected(self) -> bool:
        return self._following is not None and self._following.agent.connected

    async def run(self, address: str, stop: asyncio.Event) -> None:
        """Follows until `stop` is set; `address` is the host:port at which the engine serves. Raises as
        `WeightAgent.run` for a configured hub."""
        self._address = address
        if self._membership.broadcast is not None:
            self._begin(self._membership.broadcast.address, url=self._url, away_s=None, ahead=self._ahead)
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                changed = asyncio.create_task(self._changed.upcoming.wait())
                following = self._following
                await asyncio.wait(
                    {stopping, changed, *([following.task] if following else [])}, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                if following is not None and following is self._following and following.task.done():
                    self._following = None
                    await following.task  # raises what ended it
        finally:
            stopping.cancel()
            await self._leave(CLOSE_S)

    async def follow(self, hub: str, url: str, token: str = "") -> None:
        """Follows the hub at `hub`, registered there at `url`; returns once the hub has answered.

        `token` is shown to the hub, by default this program's own; another one means the hub of the next run at the
        same address. Raises MeshError: RUN_LIMIT_REACHED while another hub is there, UNREACHABLE."""
        async with self._changing:
            now = self._following
            if now is not None and (now.hub, now.token) == (hub, token) and not now.task.done():
                return
            if self.connected:
                raise MeshError(
                    Reason.RUN_LIMIT_REACHED,
                    f"this engine follows the hub at {self.hub}, whose run is going on; wait for its end, or take"
                    " another engine",
                )
            async with WeightSyncClient(hub) as client:
                await client.wait_until_serving(REACH_S)
            if now is not None:
                logger.info("the hub at {} has gone; the one at {} is followed now", now.hub, hub)
            await self._leave(LEAVE_S)
            await self._engine.leave_group()
            self._begin(hub, url=url, away_s=self._away_s, token=token)

    def _begin(
        self, hub: str, *, url: str, away_s: float | None, token: str = "", ahead: VersionAhead | None = None
    ) -> None:
        leave = asyncio.Event()
        client = WeightSyncClient(hub, ChannelOptions(credentials=TokenCredentials(token)) if token else None)
        at = urlsplit(url).netloc or self._address  # engines that listen at 0.0.0.0 would all have one name
        agent = WeightAgent(
            client, self._engine, self._membership, at, url=url, away_s=away_s, waits=self._waits, ahead=ahead
        )
        task = asyncio.create_task(_run(client, agent, leave, called=away_s is not None))
        self._following = _Following(hub=hub, token=token, agent=agent, task=task, leave=leave)
        self._changed.beat()

    async def _leave(self, deadline_s: float) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.leave.set()
            with suppress(TimeoutError, asyncio.CancelledError, MeshError):  # the hub's lease runs out anyway
                await asyncio.wait_for(following.task, deadline_s)


async def _run(client: WeightSyncClient, agent: WeightAgent, leave: asyncio.Event, *, called: bool) -> None:
    async with client:
        try:
            await agent.run(leave)
        except MeshError as error:
            if not called:
                raise
            logger.error("the hub that called is followed no more: {}", error)
