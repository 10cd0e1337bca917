"""How long to wait after a refusal by another service, and when to give up."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from loguru import logger

from meshrl.client.backoff import AWAY_S, Backoff
from meshrl.core.clock import Clock
from meshrl.wire.errors import MeshError, Reason

T = TypeVar("T")

AWAY = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.CANCELLED})
"""A service that is gone, is going, or went in the middle of the call."""


class RunError(Exception):
    """The run cannot go on; the message gives the reason and the remedy."""


class Patience:
    """Decides about one call that is repeated until it is accepted. A service that is away (AWAY) may come back for
    `unreachable_s`, counted anew after it answers; other retryable refusals go on for `retry_s` in all. The wait is at
    least what the service asked for, else it doubles from `base_s` to `most_s`, with jitter. `also` are further reasons
    to try again for; one of AWAY among them counts as a refusal."""

    def __init__(
        self,
        *,
        unreachable_s: float,
        retry_s: float,
        base_s: float = 0.05,
        most_s: float = AWAY_S[1],
        jitter: Callable[[], float] = random.random,
        also: frozenset[Reason] = frozenset(),
    ) -> None:
        self._unreachable_s = unreachable_s
        self._retry_s = retry_s
        self._backoff = Backoff(base_s, most_s, draw=jitter)
        self._jitter = jitter
        self._also = also
        self._away = AWAY - also
        self.first_s: float | None = None
        """When it was asked first."""
        self._away_since_s: float | None = None

    def wait_s(self, error: MeshError, now_s: float) -> float | None:
        """Before the next attempt; None to give up."""
        if not error.retryable and error.reason not in self._also | AWAY:
            return None
        if self.first_s is None:
            self.first_s = now_s
        if error.reason not in self._away:
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = now_s
        if self._away_since_s is not None and now_s - self._away_since_s >= self._unreachable_s:
            return None
        if self._away_since_s is None and now_s - self.first_s >= self._retry_s:
            return None
        wait_s = self._backoff.next_s()
        return wait_s if error.retry_after_s is None else error.retry_after_s * (1.5 - 0.5 * self._jitter())


async def persist(call: Callable[[], Awaitable[T]], patience: Patience, *, clock: Clock) -> T:
    """Raises the last MeshError."""
    while True:
        try:
            return await call()
        except MeshError as error:  # refused: patience knows whether to ask again
            wait_s = patience.wait_s(error, clock.now())
            if wait_s is None:
                raise
        await clock.sleep(wait_s)


def say_waiting(service: str, address: str, deadline_s: float) -> Callable[[str], None]:
    """Logs why a service does not serve yet, at its start."""
    return lambda why: logger.info(f"waiting for the {service} at {address}, for up to {deadline_s:g} s: {why}")


def failed(service: str, address: str, doing: str, error: MeshError) -> RunError:
    return RunError(f"{service} at {address} failed while {doing}: {error}")


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of a group of errors: a RunError if there is one, else the first."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [failures]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo = [*error.exceptions, *todo]
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, RunError)), leaves[0])
