"""Starts what plays trials (an engine where one is asked for, the rollout service), runs the work, stops them again.

The work is that of `eval` or `synthesize`. A signal ends it in order; the same command then continues where it ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.core.clock import Clock
from meshrl.core.config import ConfigError, dump_toml
from meshrl.core.credentials.https import scheme
from meshrl.core.paths import Layout
from meshrl.core.program import FAILED, run_program
from meshrl.core.telemetry.log_folder import own_log
from meshrl.core.waiting import StoppedError, unless_stopped
from meshrl.inference.config import InferenceConfig
from meshrl.launch.compose import with_values
from meshrl.launch.ports import FreePorts
from meshrl.launch.supervise import Program, Supervisor
from meshrl.rollout.main import serve
from meshrl.sampling.groups import RolloutGroup
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import GroupSampler, SamplerDeadlines
from meshrl.trials.config import TrialsConfig
from meshrl.trials.engines import PolicyEndpoints, ServerFacts
from meshrl.trials.plan import TaskSpan, Trial, plan_trials
from meshrl.trials.play import UNKNOWN_LIMIT, OnEnd, TrialPlayer
from meshrl.trials.progress import TrialProgress
from meshrl.trials.results import FAILURES, TrialResults
from meshrl.trials.service import UNREACHABLE_S, rollout_service, task_spans

TrialsConfigT = TypeVar("TrialsConfigT", bound=TrialsConfig)


@dataclass(frozen=True, kw_only=True)
class TrialRun:
    seed: int
    endpoints: PolicyEndpoints
    facts: ServerFacts
    spans: Sequence[TaskSpan]
    player: TrialPlayer
    results: TrialResults

    async def play(self, checkpoint: str, version: int | None, on_end: OnEnd) -> None:
        """Plays the trials of one checkpoint that are not done; calls `on_end` for each. Raises RunError."""
        trials = plan_trials(self.spans, seed=self.seed, checkpoint=checkpoint, done=self.results.done)
        left = Counter(trial.environment for trial in trials)
        before = {span.environment: span.rollouts - left[span.environment] for span in self.spans}
        if any(before.values()):
            logger.info("{}: {} rollouts are there, {} are left", checkpoint, sum(before.values()), len(trials))
        progress = TrialProgress(checkpoint, self.spans, before)

        def ended(trial: Trial, group: RolloutGroup) -> None:
            on_end(trial, group)
            progress.ended(trial.environment, group.rollouts[0].reward if group.rollouts else None)

        try:
            await self.player.play(trials, version=version, on_end=ended)
        finally:
            progress.close()
        if failed := self.left(checkpoint):
            logger.warning(
                "{}: {} rollouts failed, {} says why; the same command plays them again",
                checkpoint, failed, self.results.folder / FAILURES,
            )  # fmt: skip

    def left(self, checkpoint: str) -> int:
        return len(plan_trials(self.spans, seed=0, checkpoint=checkpoint, done=self.results.done))


Work = Callable[[TrialRun], Coroutine[None, None, int]]


def run_trials(
    name: str, config: TrialsConfigT, results: TrialResults, work: Work, *, conversations: bool = False
) -> NoReturn:
    async def serve(config: TrialsConfigT, stop: asyncio.Event, tracer: Tracer) -> int:
        return await serve_trials(config, results, work, stop, tracer, conversations=conversations)

    run_program(name, config, serve, blocking_threads=None)


async def serve_trials(
    config: TrialsConfig,
    results: TrialResults,
    work: Work,
    stop: asyncio.Event,
    tracer: Tracer,
    *,
    conversations: bool = False,
) -> int:
    """Opens `results`, brings up what plays, does the work; returns the exit code, 1 also for one that was stopped.
    `conversations` asks for the messages of every rollout. Raises ConfigError."""
    with results, FreePorts() as ports:
        engine = None if config.inference is None else _configure_engine(config, config.inference, ports)
        urls = config.engine_urls if engine is None else (f"{scheme()}://{engine.server.address}",)
        lead = unless_stopped(
            stop, _prepare_and_work(config, results, urls, ports("127.0.0.1"), tracer, work, conversations)
        )
        how = "failed"
        try:
            if engine is not None:
                layout = Layout(config.output_dir)
                program = Program(
                    name="inference",
                    command=[
                        str(engine.python or sys.executable), "-m", "meshrl.inference.main",
                        "@", str(layout.config("inference")),
                    ],
                    log=own_log(layout, "inference"),
                )  # fmt: skip
                lead = Supervisor([program]).run(stop, lead)
            code = await lead
            if code == 0:
                return code
        except RunError as error:
            logger.error("{}", error)
        except StoppedError:
            how = "stopped"
        logger.warning(
            "{} with {} rollouts in {}; the same command goes on from there",
            how, len(results.done), results.stored().path,
        )  # fmt: skip
        return FAILED


async def _prepare_and_work(
    config: TrialsConfig,
    results: TrialResults,
    urls: Sequence[str],
    port: int,
    tracer: Tracer,
    work: Work,
    conversations: bool,
) -> int:
    async with AsyncExitStack() as stack:
        endpoints = PolicyEndpoints(
            urls, config.client, config.deadlines,
            model=config.model.name, seq_len=config.seq_len, started=config.inference is not None,
        )  # fmt: skip
        await stack.enter_async_context(endpoints)
        facts = await endpoints.wait_until_ready()
        names = [env.resolved_name for env in config.environments]
        served = config.rollout_config(list(facts.urls), facts.api, seq_len=facts.seq_len, port=port)
        deadlines = config.deadlines
        pool = await stack.enter_async_context(
            rollout_service(
                lambda stop: serve(served, stop, tracer),
                served.server.address,
                names,
                startup_s=deadlines.environments_s,
            )
        )
        sampler = GroupSampler(
            pool,
            deadlines=SamplerDeadlines(
                group_s=deadlines.rollout_s, retry_s=deadlines.rollout_s, unreachable_s=UNREACHABLE_S
            ),
            clock=Clock(),
        )
        given = config.max_concurrent
        player = TrialPlayer(
            {env.resolved_name: env.sampling.to_wire().over(config.sampling.to_wire()) for env in config.environments},
            sampler,
            attempts=config.attempts,
            limit=lambda: given if isinstance(given, int) else pool.slots or UNKNOWN_LIMIT,
            conversations=conversations,
        )
        wanted = {
            env.resolved_name: (config.num_examples_of(env), config.group_size_of(env)) for env in config.environments
        }
        spans = task_spans(wanted, dict(pool.environments()))
        return await work(
            TrialRun(
                seed=config.seed, endpoints=endpoints, facts=facts, spans=spans, player=player, results=results
            )
        )  # fmt: skip


def _configure_engine(config: TrialsConfig, given: InferenceConfig, ports: FreePorts) -> InferenceConfig:
    values: dict[str, object] = {"output_dir": config.output_dir}
    if "model" not in given.model_fields_set:
        values["model"] = config.model.model_dump()
    if not given.server.port or "server" not in given.model_fields_set:
        values["server.port"] = ports(given.server.host)
    if config.seq_len is not None and "max_model_len" not in given.model_fields_set:
        values["max_model_len"] = config.seq_len
    engine = with_values(given, values)
    path = Layout(config.output_dir).config("inference")
    try:
        dump_toml(engine, path)
    except OSError as error:
        raise ConfigError(f"output_dir: {path} cannot be written: {error.strerror}; choose another") from error
    return engine
