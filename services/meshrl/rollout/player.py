"""The interface between `runner` and what plays rollouts: `episodes` in this process, `workers.fleet` in others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshrl.rollout.stages import RolloutStage
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutFailure, RolloutRequest


@dataclass(frozen=True)
class SerializedRollouts:
    """The rollouts of one episode, each as the bytes of a RunRolloutsResponse, which are passed on unread."""

    messages: Sequence[bytes]
    sampled_tokens: int


EpisodeResult = tuple[Rollout, ...] | SerializedRollouts | RolloutFailure
"""The rollouts of one episode, one for each agent that trains, or why there are none."""


def refuse_unknown(environment: str, num_tasks: int | None, index: int) -> None:
    """Raises MeshError UNKNOWN_TASK without a task at `index`; `num_tasks` None has them all."""
    if num_tasks is not None and index >= num_tasks:
        raise MeshError(Reason.UNKNOWN_TASK, f"{environment} has {num_tasks} tasks, there is no task {index}")


class Episodes(Protocol):
    late_s: float
    """Seconds after the group's deadline until the runner ends the rest: more than 0 for players that end it themselves
    and know better what it was doing."""

    async def play(self, index: int) -> EpisodeResult:
        """Cancelling the call ends the rollout. Raises MeshError if the group cannot be played as requested."""

    def stage(self, index: int) -> RolloutStage | None:
        """None while unknown."""

    def close(self) -> None:
        """Ends the group's play."""


class Player(Protocol):
    @property
    def info(self) -> EnvironmentInfo: ...

    async def open(self, request: RolloutRequest) -> Episodes:
        """The caller keeps the deadline. Raises MeshError for a group that cannot be played."""

    def opening(self, request: RolloutRequest) -> str:
        """The wait of a group that is not open yet, for the message of its failures."""
