"""Plays trials at the rollout service, and hands each over as it ends."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loguru import logger

from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import RolloutSampler
from meshrl.trials.engines import PolicyEndpoints, ServerFacts
from meshrl.trials.plan import TaskSpan, Trial, plan_trials
from meshrl.trials.progress import TrialProgress
from meshrl.trials.results import FAILURES, TrialResults, why_failed
from meshrl.wire.types import Sampling

MOST_FAILURES_IN_A_ROW = 64
"""So many have one cause, which the rest would meet as well."""
UNKNOWN_LIMIT = 256

OnEnd = Callable[[Trial, RolloutGroup], None]


@dataclass(frozen=True, kw_only=True)
class TrialRun:
    """The work of one command at its servers. `conversations` asks for the messages of every rollout."""

    seed: int
    endpoints: PolicyEndpoints
    facts: ServerFacts
    spans: Sequence[TaskSpan]
    results: TrialResults
    sampler: RolloutSampler
    sampling: Mapping[str, Sampling]
    attempts: int
    limit: Callable[[], int]
    """How many rollouts run at once; asked again whenever one has ended."""
    conversations: bool

    def left(self, checkpoint: str) -> int:
        return len(self._missing(checkpoint))

    def _missing(self, checkpoint: str) -> list[Trial]:
        return plan_trials(self.spans, seed=self.seed, checkpoint=checkpoint, done=self.results.done)

    async def play(self, checkpoint: str, version: int | None, on_end: OnEnd) -> None:
        """Plays the trials of one checkpoint that are not done; `on_end` gets each with its outcome. `version`, if
        given, must sample every token. Raises RunError when nothing works any more, and errors of `on_end`."""
        trials = self._missing(checkpoint)
        missing = Counter(trial.environment for trial in trials)
        before = {span.environment: span.rollouts - missing[span.environment] for span in self.spans}
        if any(before.values()):
            logger.info("{}: {} rollouts are there, {} are left", checkpoint, sum(before.values()), len(trials))
        progress = TrialProgress(checkpoint, self.spans, before)
        waiting = iter(trials)
        running: dict[asyncio.Task[RolloutGroup], Trial] = {}
        failed_in_a_row = 0
        try:
            while True:
                limit = self.limit()
                while len(running) < limit and (trial := next(waiting, None)) is not None:
                    running[asyncio.create_task(self._sample(trial, version))] = trial
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    trial, group = running.pop(task), task.result()
                    failed_in_a_row = 0 if group.rollouts else failed_in_a_row + 1
                    on_end(trial, group)
                    progress.ended(trial.environment, group.rollouts[0].reward if group.rollouts else None)
                    if failed_in_a_row >= MOST_FAILURES_IN_A_ROW:
                        raise RunError(f"{failed_in_a_row} rollouts in a row failed, the last with {why_failed(group)}")
        finally:
            progress.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if failed := self.left(checkpoint):
            logger.warning(
                "{}: {} rollouts failed, {} says why; the same command plays them again",
                checkpoint, failed, self.results.folder / FAILURES,
            )  # fmt: skip

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
        group = await self.sampler.sample_whole(
            ticket,
            sampling=self.sampling[trial.environment],
            attempts=self.attempts,
            conversations=self.conversations,
        )
        if version is not None:
            _check_version(group, version)
        return group


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
