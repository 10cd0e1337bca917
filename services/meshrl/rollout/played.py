"""What is asked of whoever plays rollouts, and what comes back: the border between `group_runner` and the players.

`episodes` plays in this process, `workers` in others; the runner does not know which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshrl.rollout.deadlines.stages import RolloutStage
from meshrl.rollout.engines.capacity import EpisodeSizes
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutFailure, RolloutRequest


@dataclass(frozen=True)
class SerializedRollouts:
    """The rollouts of one episode as they travel: each the bytes of a RunRolloutsResponse, read by nobody."""

    messages: Sequence[bytes]
    sizes: EpisodeSizes


Played = tuple[Rollout, ...] | SerializedRollouts | RolloutFailure
"""What one episode ended in."""


class PlayableGroup(Protocol):
    """A group whose task is found: its rollouts can be played."""

    async def play(self, index: int) -> Played:
        """Plays rollout `index` to its end; cancelling the call ends it. Raises nothing but CancelledError."""

    def stage(self, index: int) -> RolloutStage | None:
        """What a rollout that is being played does now; None while that is not known."""

    def close(self) -> None:
        """Nothing of the group will be played any more."""


class Player(Protocol):
    """Plays the groups of one environment."""

    @property
    def info(self) -> EnvironmentInfo: ...

    async def open(self, request: RolloutRequest) -> PlayableGroup:
        """Finds the group's task. Raises MeshError when there is none."""
