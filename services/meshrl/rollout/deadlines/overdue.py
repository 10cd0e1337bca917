"""Ends rollouts that overstep a deadline of their environment, in the process that plays them.

Between the caller for a rollout and `episodes`, which plays it; only where the environment has a deadline. The time in
which code blocked the event loop counts for none of the rollouts on it; a worker that is blocked for long is replaced.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

from meshrl.core.config.shared import StageDeadlinesConfig
from meshrl.rollout.deadlines.stages import RolloutStage, overdue, shortest_s
from meshrl.rollout.episodes import EpisodePlayer, GroupEpisodes
from meshrl.rollout.groups import rollout_failure
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutFailure, RolloutRequest

LOOK_EVERY_S = 1.0
CLEAN_UP_S = 10.0
STOOD_STILL_S = 0.5
"""A look that comes later than this was held up by code that blocked the event loop: whose it was is not known here."""


class TimedPlayer:
    """Plays one environment as `player` does, with deadlines."""

    def __init__(self, player: EpisodePlayer, deadlines: StageDeadlinesConfig) -> None:
        self._player = player
        self._deadlines = deadlines
        self._ending: set[asyncio.Task[tuple[Rollout, ...] | RolloutFailure]] = set()

    @property
    def info(self) -> EnvironmentInfo:
        return self._player.info

    async def open(self, request: RolloutRequest) -> TimedGroup:
        """Raises as `EpisodePlayer.open`."""
        return TimedGroup(await self._player.open(request), request, self._deadlines, self._ending)

    def opening(self, request: RolloutRequest) -> str:
        return self._player.opening(request)


class TimedGroup:
    """The episodes of one group, each ended when it is overdue. `ending` keeps what still cleans up behind that."""

    late_s = 0.0

    def __init__(
        self,
        episodes: GroupEpisodes,
        request: RolloutRequest,
        deadlines: StageDeadlinesConfig,
        ending: set[asyncio.Task[tuple[Rollout, ...] | RolloutFailure]],
    ) -> None:
        self._episodes = episodes
        self._request = request
        self._deadlines = deadlines
        self._ending = ending
        self._look_every_s = min(LOOK_EVERY_S, (shortest_s(deadlines) or LOOK_EVERY_S) / 4)

    def stage(self, index: int) -> RolloutStage | None:
        return self._episodes.stage(index)

    def close(self) -> None:
        self._episodes.close()

    async def play(self, index: int) -> tuple[Rollout, ...] | RolloutFailure:
        """Plays episode `index`, or gives it up with the stage in which it was overdue; its task ends behind that.
        Raises nothing but CancelledError."""
        began_s, stage_began_s, stage_still_s = time.time(), 0.0, 0.0
        playing = asyncio.create_task(self._episodes.play(index))
        try:
            while True:
                look_s = time.monotonic() + self._look_every_s
                await asyncio.wait({playing}, timeout=self._look_every_s)
                if playing.done():
                    return await playing
                stage = self._episodes.stage(index)
                if stage is None:
                    continue
                if stage.began_s != stage_began_s:
                    stage_began_s, stage_still_s = stage.began_s, 0.0
                if (still_s := time.monotonic() - look_s) > STOOD_STILL_S:  # it could not go on meanwhile
                    began_s, stage_still_s = began_s + still_s, stage_still_s + still_s
                now_s = time.time()
                in_time = replace(stage, began_s=stage.began_s + stage_still_s)
                if late := overdue(self._deadlines, in_time, began_s, now_s):
                    self._give_up(playing)
                    error = MeshError(Reason.DEADLINE_PASSED, f"{late}: {stage.describe(now_s)}")
                    return rollout_failure(self._request, error, str(uuid.uuid4()))
        except asyncio.CancelledError:
            self._give_up(playing)
            await asyncio.wait({playing}, timeout=CLEAN_UP_S)
            raise

    def _give_up(self, playing: asyncio.Task[tuple[Rollout, ...] | RolloutFailure]) -> None:
        """Cancels an episode without waiting for it: it may hold on to its cancellation for as long as it likes."""
        playing.cancel()
        self._ending.add(playing)
        playing.add_done_callback(self._ending.discard)
