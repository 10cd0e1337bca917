"""Builds the loop's parts from the config and what the services said they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.evals import Evaluator
from meshrl.orchestrator.peers.connect import Mesh
from meshrl.orchestrator.peers.logprob_check import LogprobCheck
from meshrl.orchestrator.plan import PlanLimits, WorkPlan
from meshrl.orchestrator.work.screening import screen_finished
from meshrl.orchestrator.work.staleness import StalenessLaw
from meshrl.orchestrator.work.task_schedule import TaskSchedule, TrainSource
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import GroupSampler
from meshrl.wire.types import Sampling


def make_plan(config: OrchestratorConfig, mesh: Mesh) -> WorkPlan:
    """The plan of work from the trainer's current step on. Raises RunError when there is nothing to sample."""
    sources = [
        TrainSource(
            environment=env.resolved_name,
            ratio=env.ratio,
            num_tasks=mesh.environments[env.resolved_name].num_tasks,
        )
        for env in config.train.env
    ]
    seed = config.seed if config.sampling.seed is None else config.sampling.seed
    try:
        schedule = TaskSchedule(sources, seed=config.seed)
    except ValueError as error:
        raise RunError(str(error)) from error
    inflight = config.max_inflight_rollouts or config.batch_size * (config.max_async_level + 1)
    return WorkPlan(
        law=StalenessLaw(max_async_level=config.max_async_level, max_off_policy_steps=config.max_off_policy_steps),
        limits=PlanLimits(
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            max_inflight_groups=inflight // config.group_size,
            last_step=config.last_step,
        ),
        schedule=schedule,
        screen=lambda rollouts: screen_finished(
            rollouts,
            drop_empty=config.filters.empty,
            drop_zero_signal=config.filters.zero_signal,
            tolerance=config.filters.zero_signal_tolerance,
        ),
        next_step=mesh.run.step + 1,
        active_version=mesh.run.version,
        seed=seed,
    )


def sampling_by_environment(config: OrchestratorConfig) -> Mapping[str, Sampling]:
    """An environment's own sampling over the run's; what both leave unset is the rollout service's to fill."""
    return {env.resolved_name: env.sampling.to_wire().over(config.sampling.to_wire()) for env in config.train.env}


def make_logprob_check(config: OrchestratorConfig) -> LogprobCheck:
    """Holds the engines' logprobs against the trainer's."""
    return LogprobCheck(config.logprob_check)


def make_evaluator(
    config: OrchestratorConfig, mesh: Mesh, sampler: GroupSampler, clock: Callable[[], float]
) -> Evaluator | None:
    """None when no evaluation is configured."""
    if config.eval is None:
        return None
    return Evaluator(
        config.eval,
        sampler,
        mesh.environments,
        deadline_s=config.deadlines.eval_s,
        seed=config.seed,
        clock=clock,
    )
