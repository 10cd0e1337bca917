"""Plays trials at the rollout service, as many at once as it takes, and hands each over as it ends.

Its input are the trials that are not done, its output goes to the file of results. It waits for a running trial to end
when as many run as may.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence

from loguru import logger

from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import GroupSampler
from meshrl.trials.plan import Trial
from meshrl.wire.types import Sampling

MOST_FAILURES_IN_A_ROW = 64
"""So many failures without a rollout between them are one cause, which the rest would meet as well."""
UNKNOWN_LIMIT = 256

OnEnd = Callable[[Trial, RolloutGroup], None]


class TrialPlayer:
    """Plays trials with one sampler, each environment with its `sampling`. `limit` is how many run at once."""

    def __init__(
        self,
        sampling: Mapping[str, Sampling],
        sampler: GroupSampler,
        *,
        attempts: int,
        limit: Callable[[], int],
        conversations: bool,
    ) -> None:
        self._sampling = sampling
        self._sampler = sampler
        self._attempts = attempts
        self._limit = limit
        self._conversations = conversations

    async def play(self, trials: Sequence[Trial], *, version: int | None, on_end: OnEnd) -> None:
        """Returns once every trial has ended; `on_end` gets each with what came of it, from this event loop. `version`
        is what must have sampled every token; None takes any. Raises RunError when nothing works any more, and whatever
        `on_end` raises; what ran then is cancelled."""
        waiting = iter(trials)
        running: dict[asyncio.Task[RolloutGroup], Trial] = {}
        failed_in_a_row = 0
        try:
            while True:
                limit = self._limit()
                while len(running) < limit and (trial := next(waiting, None)) is not None:
                    running[asyncio.create_task(self._sample(trial, version))] = trial
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    trial, group = running.pop(task), task.result()
                    failed_in_a_row = 0 if group.rollouts else failed_in_a_row + 1
                    on_end(trial, group)
                    if failed_in_a_row >= MOST_FAILURES_IN_A_ROW:
                        raise RunError(f"{failed_in_a_row} rollouts in a row failed, the last with {why_failed(group)}")
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _sample(self, trial: Trial, version: int | None) -> RolloutGroup:
        ticket = GroupTicket(
            group_id=f"trial-{uuid.uuid4()}",
            task=TaskRef(environment=trial.environment, index=trial.task),
            size=1,
            for_step=0,
            min_version=version or 0,
            active_version=version or 0,
            seed=trial.seed,
        )
        group = await self._sampler.sample_whole(
            ticket,
            sampling=self._sampling[trial.environment],
            attempts=self._attempts,
            conversations=self._conversations,
        )
        if version is not None:
            _check_version(group, version)
        return group


def why_failed(group: RolloutGroup) -> str:
    if group.failures:
        return f"{group.failures[-1].reason}: {group.failures[-1].message}"
    return group.cut_short or "the rollout was cancelled"


def _check_version(group: RolloutGroup, version: int) -> None:
    found = {
        span.version for rollout in group.rollouts for sample in rollout.samples for span in sample.version_spans
    } - {version}
    if found:
        logger.debug("group {} was sampled from versions {}", group.ticket.group_id, found)
        raise RunError(
            f"version {min(found)} answered where version {version} was loaded: somebody else loads weights into the"
            " engines, such as the hub of a run; use engines that follow none, or let this command start one"
            " (--inference)"
        )
