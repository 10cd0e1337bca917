"""Starts engine and rollout service, does the work of `eval` or `synthesize`, stops them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NoReturn, TypeVar

from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.core.clock import Clock
from meshrl.core.config import dump_toml
from meshrl.core.credentials.https import scheme
from meshrl.core.credentials.secret import read_secret
from meshrl.core.paths import Layout
from meshrl.core.program import FAILED, run_program
from meshrl.core.rpc.engine_http import engine_session
from meshrl.core.run_folder import writing_to
from meshrl.core.telemetry.log_folder import own_log
from meshrl.core.waiting import StoppedError, unless_stopped
from meshrl.launch.ports import FreePorts
from meshrl.launch.supervise import Program, Supervisor
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import RolloutSampler
from meshrl.trials.config import TrialsConfig
from meshrl.trials.engines import PolicyEndpoints
from meshrl.trials.plan import task_span
from meshrl.trials.play import UNKNOWN_LIMIT, TrialRun
from meshrl.trials.results import TrialResults
from meshrl.trials.service import rollout_service

TrialsConfigT = TypeVar("TrialsConfigT", bound=TrialsConfig)


Work = Callable[[TrialRun], Coroutine[None, None, int]]


def run_trials(name: str, config: TrialsConfigT, results: TrialResults, work: Work) -> NoReturn:
    run_program(name, config, partial(serve_trials, results=results, work=work), blocking_threads=None)


async def serve_trials(
    config: TrialsConfig, stop: asyncio.Event, tracer: Tracer, *, results: TrialResults, work: Work
) -> int:
    """Returns the exit code, 1 also after a stop. Raises ConfigError."""
    with results, FreePorts() as ports:
        engine = config.engine_config(ports)
        urls = config.engine_urls if engine is None else (f"{scheme()}://{engine.server.address}",)
        lead = unless_stopped(stop, _prepare_and_work(config, results, urls, ports("127.0.0.1"), tracer, work))
        how = "failed"
        try:
            if engine is not None:
                layout = Layout(config.output_dir)
                written = layout.config("inference")
                with writing_to(config.output_dir):
                    dump_toml(engine, written)
                program = Program(
                    name="inference",
                    command=[str(engine.python or sys.executable), "-m", "meshrl.inference.main", "@", str(written)],
                    log=own_log(layout, "inference"),
                )
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
            how, len(results.done), results.stored.path,
        )  # fmt: skip
        return FAILED


async def _prepare_and_work(
    config: TrialsConfig, results: TrialResults, urls: Sequence[str], port: int, tracer: Tracer, work: Work
) -> int:
    async with AsyncExitStack() as stack:
        client, deadlines = config.client, config.deadlines
        key = read_secret(
            "client.api_key", None, file=client.api_key_file, variable=client.api_key_var, environ=os.environ
        )
        http = await stack.enter_async_context(engine_session(key))
        started = config.inference is not None
        endpoints = PolicyEndpoints(http, urls, base_model=config.model.name, started=started, deadlines=deadlines)
        facts = await endpoints.wait_until_ready(client, config.seq_len)
        served = config.rollout_config(list(facts.urls), facts.api, seq_len=facts.seq_len, port=port)
        pool = await stack.enter_async_context(rollout_service(served, tracer, startup_s=deadlines.environments_s))
        sampler = RolloutSampler(pool, group_s=deadlines.rollout_s, retry_s=deadlines.rollout_s, clock=Clock())
        hosted, given = pool.environments(), config.max_concurrent
        run = TrialRun(
            seed=config.seed,
            endpoints=endpoints,
            facts=facts,
            spans=[
                task_span(
                    env.resolved_name,
                    wanted=config.num_examples_of(env),
                    there=hosted[env.resolved_name].num_tasks,
                    group_size=config.group_size_of(env),
                )
                for env in config.environments
            ],
            results=results,
            sampler=sampler,
            sampling={
                env.resolved_name: env.sampling.to_wire().over(config.sampling.to_wire()) for env in config.environments
            },
            attempts=config.attempts,
            limit=lambda: given if isinstance(given, int) else pool.slots or UNKNOWN_LIMIT,
            conversations=config.keeps_conversations,
        )
        return await work(run)
