"""Logs rollouts that fail, and those that wait for long.

A broken server or environment fails hundreds in the same way: the first of a kind is logged at once, others at level
DEBUG and as a count, once a minute.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loguru import logger

from meshrl.rollout.stages import RolloutStage
from meshrl.wire.trace import trace_id_of
from meshrl.wire.types import RolloutFailure

SAY_EVERY_S = 60.0
NUMBER = re.compile(r"[0-9a-f-]*\d[0-9a-f-]*")
"""Differs between messages of one kind: seconds, ports, ids."""


@dataclass
class _Kind:
    """Failures that differ in numbers alone. `last` was not logged yet."""

    logged_s: float
    unlogged: int = 0
    last: RolloutFailure | None = None


class FailureLog:
    """By environment, reason and message. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], _Kind] = {}

    def add(self, environment: str, failure: RolloutFailure, now_s: float) -> None:
        kind = self._kinds.get(key := (environment, failure.reason, NUMBER.sub("", failure.message)))
        trace_id = trace_id_of(failure.traceparent)
        bound = logger.bind(env=environment, **({"trace_id": trace_id} if trace_id else {}))
        said = "rollout {} of {} failed: {}: {}"
        named = failure.rollout_id, environment, failure.reason, failure.message
        if kind is None:
            self._kinds[key] = _Kind(now_s)
            bound.warning(said, *named)
            return
        kind.unlogged, kind.last = kind.unlogged + 1, failure
        bound.debug(said, *named)

    def log_counts(self, now_s: float, *, every_s: float = SAY_EVERY_S) -> None:
        for key, kind in list(self._kinds.items()):
            if now_s - kind.logged_s < every_s:
                continue
            if kind.last is None:
                del self._kinds[key]  # the next one is said at once again
                continue
            environment = key[0]
            logger.bind(env=environment).warning(
                "{} more rollouts of {} failed in that way, the last with {}: {}",
                kind.unlogged, environment, kind.last.reason, kind.last.message,
            )  # fmt: skip
            self._kinds[key] = _Kind(now_s)


LOOK_EVERY_S = 5.0
LONG_S = 30.0
MOST_NAMED = 3


def log_waiting(environment: str, line: str) -> None:
    logger.bind(env=environment).warning("{}", line)


class WaitingReport:
    """Long waits by environment and stage, at most once a minute. Times are of one clock, in seconds."""

    def __init__(self, say: Callable[[str, str], None] = log_waiting) -> None:
        self._say = say
        self._said_s = float("-inf")

    def look(self, doing: Iterable[tuple[str, RolloutStage]], now_s: float) -> None:
        if now_s - self._said_s < SAY_EVERY_S:
            return
        waits: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for environment, stage in doing:
            seconds = stage.seconds(now_s)
            if seconds >= LONG_S and not stage.worker:
                waits[environment, stage.what].append(seconds)
        if not waits:
            return
        self._said_s = now_s
        ordered = sorted(waits.items(), key=lambda item: max(item[1]), reverse=True)
        for (environment, what), waited_s in ordered[:MOST_NAMED]:
            self._say(
                environment,
                f"waiting for environment {environment}: {len(waited_s)} rollouts {what}, the longest for"
                f" {max(waited_s):.0f} s; its deadlines (setup_s, turn_s, scoring_s, rollout_s) would end them",
            )
