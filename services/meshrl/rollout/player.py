"""The interface between `group_runner` and what plays rollouts: players, the groups they open, and what comes back.

`episodes` implements it for this process, `workers.players` for worker processes; the runner does not know which.
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
    """The rollouts of one episode, each as the bytes of a RunRolloutsResponse, which the front passes on unread."""

    messages: Sequence[bytes]
    sizes: EpisodeSizes


EpisodeResult = tuple[Rollout, ...] | SerializedRollouts | RolloutFailure
"""What one episode ended in: its rollouts, one for each agent that trains, or why there are none."""


class PlayableGroup(Protocol):
    """A group whose task is found: its rollouts can be played."""

    async def play(self, index: int) -> EpisodeResult:
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
        """Finds the group's task; the caller keeps the deadline. Raises MeshError when there is none."""

    def opening(self, request: RolloutRequest) -> str:
        """What a group waits for whose task is not found yet, for the message of its failures."""
