"""Evaluates the policy in held-out environments, beside training or between two steps; called by the finisher."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence

from loguru import logger
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Tracer

from meshrl.core.clock import Clock
from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import Monitor
from meshrl.core.telemetry.tracing import EVALUATION_SPAN
from meshrl.orchestrator.config import EvalConfig, EvalEnvConfig
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef, eval_metrics
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import GroupSampler
from meshrl.wire.trace import current_traceparent
from meshrl.wire.types import EnvironmentInfo, Sampling

ATTEMPTS = 3
"""How often a rollout of an evaluation is sampled before it counts as failed."""


class Evaluator:
    def __init__(
        self,
        config: EvalConfig,
        sampler: GroupSampler,
        environments: Mapping[str, EnvironmentInfo],
        *,
        deadline_s: float,
        seed: int,
        monitor: Monitor,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        self.busy = False
        """Whether an evaluation runs now."""
        self._config = config
        self._sampler = sampler
        self._environments = environments
        self._deadline_s = deadline_s
        self._seed = seed
        self._monitor = monitor
        self._clock = clock
        self._tracer = tracer or NoOpTracer()
        self._one_at_a_time = asyncio.Lock()

    def due(self, step: int) -> list[EvalEnvConfig]:
        return [env for env in self._config.env if step % self._config.interval_of(env) == 0]

    def owed(self, after: int, upto: int) -> tuple[int, list[EvalEnvConfig]]:
        """The environments that were due after step `after` and up to step `upto`, and the last of their steps."""
        intervals = {env.resolved_name: self._config.interval_of(env) for env in self._config.env}
        last = {name: upto // interval * interval for name, interval in intervals.items()}
        envs = [env for env in self._config.env if last[env.resolved_name] > after]
        return max((last[env.resolved_name] for env in envs), default=0), envs

    def due_before(self, version: int) -> list[EvalEnvConfig]:
        return self._config.env if self._config.eval_base and version == 0 else []

    def due_after(self, last_step: int) -> list[EvalEnvConfig]:
        """Those in which the last version is evaluated once training is over, because it was not during the run."""
        done = self.due(last_step)
        wanted = self._config.eval_final and last_step > 0
        return [env for env in self._config.env if wanted and env not in done]

    async def evaluate(self, step: int, envs: Sequence[EvalEnvConfig], *, version: int) -> None:
        """Scores these environments, answered by `version` or newer, and writes a record of its own under `step`.
        Raises RunError when it takes too long."""
        self.busy = True
        began_s = self._clock.now()
        metrics: dict[str, float] = {}
        try:
            async with self._one_at_a_time, asyncio.timeout(self._deadline_s):
                for env in envs:
                    # A span of its own, which every rollout of the evaluation links to.
                    with self._tracer.start_as_current_span(
                        EVALUATION_SPAN,
                        context=Context(),
                        attributes={"rl.step": step, "rl.version": version, "meshrl.environment": env.resolved_name},
                    ) as span:
                        scores = await self._score_environment(env, version)
                        span.set_attributes({name: value for name, value in scores.items() if "@" in name})
                        metrics |= scores
        except TimeoutError:
            raise RunError(
                f"evaluation of version {version} did not end within {self._deadline_s:g} s;"
                " lower orchestrator.eval.num_examples or raise orchestrator.deadlines.eval_s"
            ) from None
        metrics |= {"time/eval": self._clock.now() - began_s, "eval/version": float(version)}
        self.busy = False
        await asyncio.to_thread(self._monitor.log, step, CATALOGUE.record(Source.ORCHESTRATOR, metrics))

    async def _score_environment(self, env: EvalEnvConfig, version: int) -> dict[str, float]:
        """The scores of one environment. The log says how many rollouts they are over, and why others are missing."""
        name, config = env.resolved_name, self._config
        sampling = env.sampling.to_wire().over(config.sampling.to_wire())
        num_tasks, wanted = self._environments[name].num_tasks, config.num_examples_of(env)
        size = config.group_size_of(env)
        if num_tasks is not None:
            wanted = num_tasks if wanted < 0 else min(wanted, num_tasks)
        logger.debug(f"evaluating {wanted} tasks of {name} with {size} rollouts each")
        slots = asyncio.Semaphore(max(1, config.max_inflight_rollouts // size))
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    self._sample_task(TaskRef(environment=name, index=index), size, sampling, version, slots)
                )
                for index in range(wanted)
            ]
        groups = [task.result() for task in running]
        scored, asked = sum(len(group.rollouts) for group in groups), sum(group.ticket.size for group in groups)
        text = f"evaluation of version {version} in {name} scored {scored} of {asked} rollouts"
        if scored >= asked:
            logger.info(text)
        else:
            why = [f"{one.reason}: {one.message}" for group in groups for one in group.failures]
            why += [group.cut_short for group in groups if group.cut_short]
            last = f", the last with {why[-1]}" if why else ""
            logger.warning(f"{text}; the others failed{last}; failures that may pass were tried {ATTEMPTS} times")
        return eval_metrics(name, groups, k=size, pass_threshold=config.pass_threshold)

    async def _sample_task(
        self, task: TaskRef, size: int, sampling: Sampling, version: int, slots: asyncio.Semaphore
    ) -> RolloutGroup:
        ticket = GroupTicket(
            group_id=f"eval-{uuid.uuid4()}",
            task=task,
            size=size,
            for_step=0,
            min_version=version,
            active_version=version,
            seed=((self._seed % 2**31) << 32) + task.index * size,
        )
        async with slots:
            return await self._sampler.sample_whole(
                ticket, sampling=sampling, attempts=ATTEMPTS, traceparent=current_traceparent()
            )
