"""Reports what the service waits for longest, by environment and stage, at most once a minute.

`group_runner` passes in the stages of its rollouts a few times a minute; nothing is reported while none is stuck. What
a worker process plays is reported by the worker, and logged by its front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

    count: int = 0
    longest_s: float = 0.0


def log_waiting(environment: str, line: str) -> None:
    """Logs a line about an environment, to its own log as well."""
    logger.bind(env=environment).warning("{}", line)


class WaitingReport:
    """Remembers when it reported last. Times are of one clock, in seconds; `say` gets an environment and a line."""

    def __init__(self, say: Callable[[str, str], None] = log_waiting) -> None:
        self._say = say
        self._said_s = float("-inf")

    def look(self, doing: Iterable[tuple[str, RolloutStage]], now_s: float) -> None:
        """`doing` is each rollout that is being played: its environment and its stage."""
        if now_s - self._said_s < SAY_EVERY_S:
            return
        waits: dict[tuple[str, str], _Waiting] = {}
        for environment, stage in doing:
            seconds = stage.seconds(now_s)
            if seconds < LONG_S or stage.worker:
                continue
            wait = waits.setdefault((environment, stage.what), _Waiting())
            wait.count += 1
            wait.longest_s = max(wait.longest_s, seconds)
        if not waits:
            return
        self._said_s = now_s
        ordered = sorted(waits.items(), key=lambda item: item[1].longest_s, reverse=True)
        for (environment, what), wait in ordered[:MOST_NAMED]:
            self._say(
                environment,
                f"waiting for environment {environment}: {wait.count} rollouts {what}, the longest for"
                f" {wait.longest_s:.0f} s; its deadlines (setup_s, turn_s, scoring_s, rollout_s) would end them",
            )
