"""Builds the loop and its parts from the configuration and the services' answers."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Tracer

from meshrl.algorithms.recipes.base import Recipe
from meshrl.core.clock import Clock
from meshrl.core.paths import Layout
from meshrl.core.telemetry.monitor import Monitor
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.dispatch import Dispatcher, LossLimit
from meshrl.orchestrator.evals import Evaluator
from meshrl.orchestrator.finish import StepFinisher
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.loop import RunLoop
from meshrl.orchestrator.peers.batch_uploader import BatchUploader
from meshrl.orchestrator.peers.connect import Mesh, Services
from meshrl.orchestrator.peers.version_relay import VersionRelay
from meshrl.orchestrator.reports.alerts import Alerts
from meshrl.orchestrator.reports.logprob_check import LogprobCheck
from meshrl.orchestrator.reports.rollout_samples import RolloutSamplesWriter
from meshrl.orchestrator.reports.step_reporter import StepReporter
from meshrl.orchestrator.run import Run, SlotUse
from meshrl.orchestrator.teachers.scorer import build_scorer
from meshrl.orchestrator.work.batches import BatchMaker
from meshrl.orchestrator.work.plan import PlanLimits, StalenessLaw, TaskSchedule, TrainSource, WorkPlan
from meshrl.orchestrator.work.recipes import least_rollouts
from meshrl.orchestrator.work.screening import screen_finished
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import RolloutSampler
from meshrl.wire.types import ActivationPolicy


def make_plan(config: OrchestratorConfig, mesh: Mesh, recipes: Mapping[str, Recipe]) -> WorkPlan:
    """From the trainer's current step on. Raises RunError for an empty taskset."""
    sources = [
        TrainSource(
            environment=env.resolved_name,
            ratio=env.ratio,
            num_tasks=mesh.environments[env.resolved_name].num_tasks,
        )
        for env in config.train.env
    ]
    try:
        schedule = TaskSchedule(sources, seed=config.task_seed, follow_mixture=config.train.follow_mixture)
    except ValueError as error:
        raise RunError(str(error)) from error
    return WorkPlan(
        law=StalenessLaw(max_async_level=config.max_async_level, max_off_policy_steps=config.max_off_policy_steps),
        limits=PlanLimits(
            batch_size=config.batch_size,
            group_sizes=config.group_sizes,
            max_inflight_rollouts=config.max_inflight_rollouts,
            last_step=config.last_step,
            least_rollouts=least_rollouts(recipes),
            max_zero_signal_groups=config.filters.max_zero_signal_groups,
        ),
        schedule=schedule,
        screen=lambda environment, rollouts: screen_finished(
            rollouts,
            drop_empty=config.filters.empty,
            drop_zero_signal=config.filters.zero_signal and recipes[environment].needs_signal,
            tolerance=config.filters.zero_signal_tolerance,
            least=recipes[environment].least_rollouts,
        ),
        next_step=mesh.run.step + 1,
        active_version=mesh.run.version,
        seed=config.sampling_seed,
    )


def build_loop(
    config: OrchestratorConfig,
    services: Services,
    mesh: Mesh,
    *,
    recipes: Mapping[str, Recipe],
    journal: Journal,
    monitor: Monitor,
    tracer: Tracer,
) -> RunLoop:
    """Raises RunError as `make_plan`."""
    clock = Clock()
    run = Run(
        mesh.run,
        plan=make_plan(config, mesh, recipes),
        journal=journal,
        slots=SlotUse(clock.now, lambda: services.rollouts.slots, lambda: journal.ledger.out),
        services=config.services,
        in_flight=services.rollouts.in_flight,
        tracer=tracer,
        clock=clock,
    )
    scorer = build_scorer(recipes, config.teachers, services.weights, engine_pool=config.engine_pool)
    deadlines, envs = config.deadlines, config.train.env
    sampler = RolloutSampler(
        services.rollouts,
        group_s=deadlines.group_s,
        retry_s=deadlines.retry_s,
        engine_pool=config.engine_pool,
        run_id=mesh.run.run_id,
        routed_experts=mesh.trainer.router_replay is not None,
        clock=clock,
    )
    teacher = RolloutSampler(services.teachers, group_s=deadlines.group_s, retry_s=deadlines.retry_s, clock=clock)
    dispatcher = Dispatcher(
        run,
        mesh.trainer,
        sampler,
        sampling={env.resolved_name: env.sampling.to_wire().over(config.sampling.to_wire()) for env in envs},
        taught=dict.fromkeys(config.taught_environments, teacher),
        scorer=scorer,
        lost=LossLimit(
            run.plan.limits.least_rollouts,
            most_in_a_row=config.filters.max_lost_groups,
            unreachable_s=deadlines.unreachable_s,
            services=config.services.rollout,
            clock=clock,
        ),
        longest_first=config.sampling_seed is None,
    )
    batches = BatchMaker(
        recipes,
        scorer,
        mesh.trainer,
        run_id=mesh.run.run_id,
        seq_len=config.seq_len,
        environments={env.resolved_name: env.seq_len or config.seq_len for env in envs},
    )
    uploader = BatchUploader(services.trainer, run, deadlines=deadlines)
    relay = VersionRelay(
        services.weights,
        run_id=mesh.run.run_id,
        policy=ActivationPolicy(config.activation_policy),
        deadlines=deadlines,
        engine_pool=config.engine_pool,
        min_ready=config.min_ready,
        clock=clock,
    )
    evaluator = Evaluator(
        run,
        config.eval,
        sampler,
        mesh.environments,
        deadline_s=deadlines.eval_s,
        seed=config.task_seed,
        monitor=monitor,
    )
    samples = None
    if config.rollout_samples is not None:
        samples = RolloutSamplesWriter(config.rollout_samples, Layout(config.output_dir).rollouts)
        samples.set_aside_after(journal.starting_point.recorded)
    finisher = StepFinisher(
        run,
        uploader=uploader,
        relay=relay,
        dispatcher=dispatcher,
        evaluator=evaluator,
        logprobs=LogprobCheck(config.logprob_check),
        reporter=StepReporter(
            run,
            monitor,
            alerts=Alerts(synchronous=run.plan.law.synchronous, ignored=config.alerts.ignore),
            samples=samples,
            log_extras=config.log_extras,
            seq_len=config.seq_len,
            mixture=config.mixture,
            keep_records=config.bench,
        ),
    )
    return RunLoop(
        run,
        batches=batches,
        dispatcher=dispatcher,
        uploader=uploader,
        relay=relay,
        finisher=finisher,
        evaluator=evaluator,
        batch_s=deadlines.batch_s,
        sleep_engines=config.sleep_engines,
    )
