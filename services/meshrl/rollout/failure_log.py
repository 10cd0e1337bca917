"""Logs failed rollouts: the first of a kind at once, those like it as a count, once a minute.

`group_runner` reports each failure. A server or an environment that is broken fails hundreds in the same way: all but
the first are logged at level DEBUG. Every failure goes to the caller with its own message as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from loguru import logger

from meshrl.wire.trace import trace_id_of
from meshrl.wire.types import RolloutFailure

SAY_EVERY_S = 60.0
NUMBER = re.compile(r"[0-9a-f-]*\d[0-9a-f-]*")
"""What differs between messages of one kind: seconds, ports, ids."""


@dataclass
class _Kind:
    """Failures of one environment whose messages differ in numbers alone. `last` is one that was not logged yet."""

    logged_s: float
    unlogged: int = 0
    last: RolloutFailure | None = None


class FailureLog:
    """Counts failures by environment, reason and message. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], _Kind] = {}

    def add(self, environment: str, failure: RolloutFailure, now_s: float) -> None:
        """A rollout has failed."""
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
        """Counts the failures not logged yet, of each kind whose last line is `every_s` old."""
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
