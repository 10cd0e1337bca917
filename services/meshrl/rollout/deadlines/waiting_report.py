"""Logs what the service waits for longest, by environment and stage, at most once a minute.

`group_runner` passes in the stages of its rollouts a few times a minute; nothing is logged while none is stuck.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loguru import logger

from meshrl.rollout.deadlines.stages import RolloutStage

LOOK_EVERY_S = 5.0
SAY_EVERY_S = 60.0
LONG_S = 30.0
MOST_NAMED = 3


@dataclass
class _Waiting:
    """Rollouts of one environment that have been in one stage for long."""

    count: int
    longest_s: float
    worker: str


class WaitingReport:
    """Remembers when it spoke last. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._said_s = float("-inf")

    def look(self, doing: Iterable[tuple[str, RolloutStage]], now_s: float) -> None:
        """`doing` is each rollout that is being played: its environment and its stage."""
        if now_s - self._said_s < SAY_EVERY_S:
            return
        waits: dict[tuple[str, str], _Waiting] = {}
        for environment, stage in doing:
            seconds = stage.seconds(now_s)
            if seconds < LONG_S:
                continue
            wait = waits.setdefault((environment, stage.what), _Waiting(0, 0.0, ""))
            wait.count += 1
            if seconds > wait.longest_s:
                wait.longest_s, wait.worker = seconds, stage.worker
        if not waits:
            return
        self._said_s = now_s
        ordered = sorted(waits.items(), key=lambda item: item[1].longest_s, reverse=True)
        for (environment, what), wait in ordered[:MOST_NAMED]:
            where = f" ({wait.worker})" if wait.worker else ""
            logger.bind(env=environment).warning(
                "waiting for environment {}: {} rollouts {}, the longest for {:.0f} s{}; its deadlines"
                " (setup_s, turn_s, scoring_s, rollout_s) would end them",
                environment, wait.count, what, wait.longest_s, where,
            )  # fmt: skip
