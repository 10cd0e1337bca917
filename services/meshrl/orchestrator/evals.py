"""Evaluates the policy in held-out environments, beside training or between two steps."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence

from loguru import logger
from opentelemetry.context import Context

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import Monitor
from meshrl.core.telemetry.tracing import EVALUATION_SPAN
from meshrl.orchestrator.config import EvalConfig, EvalEnvConfig
from meshrl.orchestrator.run import Run
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef, eval_metrics, rollout_seed
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import RolloutSampler
from meshrl.wire.trace import current_traceparent
from meshrl.wire.types import EnvironmentInfo, Sampling

ATTEMPTS = 3
"""Of a rollout of an evaluation, before it counts as failed."""


class Evaluator:
    """None as `config` evaluates nothing."""

    def __init__(
        self,
        run: Run,
        config: EvalConfig | None,
        sampler: RolloutSampler,
        environments: Mapping[str, EnvironmentInfo],
        *,
        deadline_s: float,
        seed: int,
        monitor: Monitor,
    ) -> None:
        self.busy = False
        self._run = run
        self._config = EvalConfig.model_construct() if config is None else config
        self._evaluated = run.journal.starting_point.evaluated
        self._sampler = sampler
        self._environments = environments
        self._deadline_s = deadline_s
        self._seed = seed
        self._monitor = monitor
        self._one_at_a_time = asyncio.Lock()

    async def before_training(self, version: int) -> None:
        if self._config.eval_base and version == 0:
            await self._wait_for(0, self._config.env, version)

    async def go_on(self, tasks: asyncio.TaskGroup) -> None:
        """Those that an earlier process left, one for each environment."""
        done = self._run.info.step
        last = [(env, done - done % self._config.interval_of(env)) for env in self._config.env]
        if owed := [(env, step) for env, step in last if step > self._evaluated]:
            step = max(step for _, step in owed)
            logger.info("the evaluation of step {} was cut off, and begins anew", step)
            await self._begin(step, [env for env, _ in owed], self._run.plan.active_version, tasks)

    async def after_step(self, step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """Begins the evaluations due in `tasks`; a synchronous run waits for them."""
        if step > self._evaluated:
            await self._begin(step, self._due(step), version, tasks)

    async def after_training(self, last_step: int) -> None:
        """Evaluates the last version where that is not done."""
        if self._config.eval_final and last_step > 0:
            done = self._due(last_step)
            missing = [env for env in self._config.env if env not in done]
            await self._wait_for(last_step, missing, self._run.plan.active_version)

    def _due(self, step: int) -> list[EvalEnvConfig]:
        return [env for env in self._config.env if step % self._config.interval_of(env) == 0]

    async def _begin(self, step: int, envs: Sequence[EvalEnvConfig], version: int, tasks: asyncio.TaskGroup) -> None:
        if not envs:
            return
        self._evaluated = step
        if self._run.plan.law.synchronous:
            await self._wait_for(step, envs, version)
        else:
            tasks.create_task(self._evaluate(step, envs, version))

    async def _wait_for(self, step: int, envs: Sequence[EvalEnvConfig], version: int) -> None:
        if envs:
            with self._run.stage("evaluation", step):
                await self._evaluate(step, envs, version)

    async def _evaluate(self, step: int, envs: Sequence[EvalEnvConfig], version: int) -> None:
        self.busy = True
        began_s = self._run.clock.now()
        metrics: dict[str, float] = {}
        try:
            async with self._one_at_a_time, asyncio.timeout(self._deadline_s):
                for env in envs:
                    # A span of its own, which every rollout of the evaluation links to.
                    with self._run.tracer.start_as_current_span(
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
        metrics |= {"time/eval": self._run.clock.now() - began_s, "eval/version": float(version)}
        self.busy = False
        await asyncio.to_thread(self._monitor.log, step, CATALOGUE.record(Source.ORCHESTRATOR, metrics))

    async def _score_environment(self, env: EvalEnvConfig, version: int) -> dict[str, float]:
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
            seed=rollout_seed(self._seed, task.index * size),
        )
        async with slots:
            return await self._sampler.sample_whole(
                ticket, sampling=sampling, attempts=ATTEMPTS, traceparent=current_traceparent()
            )
