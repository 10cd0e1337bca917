"""Waits for the services at the start, learns what they are, and checks that the config fits them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from meshrl.client import ChannelOptions, TrainerClient, WeightSyncClient
from meshrl.client.channel import ServiceClient
from meshrl.core.config.shared import ServicesConfig
from meshrl.core.paths import INVALID, ORCH_TOML, Layout
from meshrl.core.telemetry.waits import Waits
from meshrl.orchestrator.config import EvalConfig, NewRunConfig, OrchestratorConfig
from meshrl.orchestrator.exchange.config import ExchangeConfig
from meshrl.sampling.hosts import HostTable
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.retry import RunError, failed, first_cause, say_waiting
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, RunInfo, TrainerInfo

NO_PLACE = (Reason.RUN_LIMIT_REACHED, Reason.NO_ROOM_FOR_RUN)
PLACE_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Services:
    rollouts: RolloutPool
    trainer: TrainerClient
    weights: WeightSyncClient
    teachers: RolloutPool
    """Rollout services in which a teacher plays."""

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with self.rollouts.watching(), self.teachers.watching():
            yield

    async def close(self) -> None:
        for client in (self.rollouts, self.trainer, self.weights, self.teachers):
            await client.close()


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The services' descriptions of themselves. `run` is the trainer's run to feed."""

    environments: Mapping[str, EnvironmentInfo]
    trainer: TrainerInfo
    run: RunInfo


def connect(
    services: ServicesConfig,
    *,
    unreachable_s: float,
    exchange: ExchangeConfig | None = None,
    teachers: Sequence[str] = (),
) -> Services:
    """Nothing is dialled yet. Workers dial in at `exchange`, the teacher plays in `teachers`."""
    options = ChannelOptions(reconnect_s=unreachable_s)
    return Services(
        rollouts=RolloutPool(
            services.rollout,
            unreachable_s=unreachable_s,
            options=options,
            dial_in=None if exchange is None else (exchange.address, exchange.workers),
        ),
        trainer=TrainerClient(services.trainer, options),
        weights=WeightSyncClient(services.weights, options),
        teachers=RolloutPool(teachers, unreachable_s=unreachable_s, options=options),
    )


async def wait_for_services(config: OrchestratorConfig, services: Services, waits: Waits) -> Mesh:
    """Returns once all serve; each is a wait of its own, for the watchdog. Raises RunError when one does not in time,
    or does not fit the config."""
    deadline_s = config.deadlines.startup_s
    wanted = [("train", env.resolved_name) for env in config.train.env]
    wanted += [("eval", env.resolved_name) for env in (config.eval.env if config.eval is not None else ())]
    try:
        async with asyncio.TaskGroup() as waiting:
            for pool, hosted, program in (
                (services.rollouts, [name for _, name in wanted], "rollout"),
                (services.teachers, config.taught_environments, "teacher"),
            ):
                waiting.create_task(_wait_for_pool(program, pool, hosted, deadline_s, waits))
            waiting.create_task(_wait_for("trainer", services.trainer, deadline_s, waits, "trainer"))
            waiting.create_task(_wait_for("weight hub", services.weights, deadline_s, waits, "weights"))
    except BaseExceptionGroup as failures:  # one that never comes is enough: the others are not waited for
        raise first_cause(failures) from failures
    try:
        trainer = await services.trainer.get_trainer()
    except MeshError as error:
        raise failed("trainer", services.trainer.address, "introducing itself", error) from error
    environments = services.rollouts.environments()
    check_hosted(wanted, services.rollouts.table)  # before the trainer has made a run, which would stay there
    check_fit(environments, trainer, config.seq_len, config.eval)
    mesh = Mesh(
        environments=environments,
        trainer=trainer,
        run=await the_run(
            config.run_id,
            config.run,
            trainer,
            services.trainer,
            control=Layout(config.output_dir).control if config.is_found else None,
            place_s=config.deadlines.place_s,
        ),
    )
    logger.info(
        f"trainer {trainer.model} at step {mesh.run.step} (run {mesh.run.run_id}, {trainer.objective} loss);"
        f" environments {', '.join(mesh.environments)}"
    )
    if config.seq_len < trainer.seq_len:
        logger.info(
            f"rows of {config.seq_len} tokens are packed for a trainer that takes {trainer.seq_len}, which is faster;"
            f" set orchestrator.seq_len = {trainer.seq_len}"
        )
    return mesh


async def _wait_for_pool(
    program: str, pool: RolloutPool, hosted: Collection[str], deadline_s: float, waits: Waits
) -> None:
    with waits.waiting(
        program, f"the {program} service to serve", lambda: (*pool.not_dialled_in(hosted), *pool.not_serving(), program)
    ):
        await pool.gather(hosted, startup_s=deadline_s)


async def _wait_for(name: str, client: ServiceClient, deadline_s: float, waits: Waits, program: str) -> None:
    try:
        with waits.waiting(program, f"the {name} to serve", (client.address, program)):
            await client.wait_until_serving(deadline_s, say_waiting(name, client.address, deadline_s))
    except MeshError as error:
        raise failed(name, client.address, "starting", error) from error


async def the_run(
    run_id: str,
    own: NewRunConfig | None,
    trainer: TrainerInfo,
    client: TrainerClient,
    *,
    control: Path | None = None,
    place_s: float = 0.0,
) -> RunInfo:
    """The run to feed, which is made if the trainer lacks it and it may be; with `control`, the folder by which the
    trainer finds it, by the trainer. Waits up to `place_s` for it, also while the trainer is full. Raises RunError."""
    if any(run.run_id == run_id for run in trainer.runs) or (own is None and control is None):
        return find_run(run_id, trainer)
    deadline, told = time.monotonic() + place_s, False
    while True:
        try:
            if own is not None:
                made = await client.create_run(run_id, own.spec(trainer.default_adapter))
                logger.info(f"made the run {made.run_id} at the trainer")
                return made
            assert control is not None
            found = [run for run in await client.list_runs() if run.run_id == run_id]
            if found:
                return found[0]
            why = f"the trainer has not taken up {control / ORCH_TOML}"
            if (control / INVALID).exists():
                raise RunError(f"{why}: {(control / INVALID).read_text().strip()}")
        except MeshError as error:
            if error.reason not in NO_PLACE or trainer.max_runs < 2:  # one that takes no runs never will
                raise failed("trainer", client.address, f"making the run {run_id!r}", error) from error
            why = str(error)
        except ValueError as error:
            raise RunError(str(error)) from error
        if time.monotonic() > deadline:
            raise RunError(f"no place for the run {run_id!r} in deadlines.place_s ({place_s:g} s): {why}")
        if not told:
            logger.info(f"the run {run_id} waits, for up to {place_s:g} s: {why}")
            told = True
        await asyncio.sleep(PLACE_POLL_S)


def find_run(run_id: str, trainer: TrainerInfo) -> RunInfo:
    """An empty id is the trainer's own run. Raises RunError when there is none of this name."""
    for run in trainer.runs:
        if not run_id or run.run_id == run_id:
            return run
    known = ", ".join(run.run_id for run in trainer.runs)
    raise RunError(
        f"orchestrator.run_id {run_id!r} is not a run of the trainer; it has {known or 'none'}; to add one, set"
        " orchestrator.run, such as run.share = 1"
    )


def check_hosted(wanted: Sequence[tuple[str, str]], table: HostTable) -> None:
    """Raises RunError for environments, each after its section, that no service hosts."""
    missing = [(section, name) for section, name in wanted if not table.hosting(name)]
    if not missing:
        return
    names = ", ".join(f"orchestrator.{section}.env names {name!r}" for section, name in missing)
    lists = [(host.address, ", ".join(host.environments) or "none") for host in table.hosts]
    if len(lists) == 1:
        raise RunError(f"{names}, which the rollout service does not host; it has {lists[0][1]}")
    raise RunError(
        f"{names}, which no rollout service hosts;"
        + "".join(f" {address} has {has};" for address, has in lists)
        + " host it at one of them, or correct the name"
    )


def check_fit(
    environments: Mapping[str, EnvironmentInfo], trainer: TrainerInfo, seq_len: int, evaluated: EvalConfig | None
) -> None:
    """Raises RunError if the config asks for what the services do not have."""
    if seq_len > trainer.seq_len:
        raise RunError(
            f"orchestrator.seq_len must be at most the trainer's ({trainer.seq_len}), got {seq_len};"
            " lower it, or raise trainer.seq_len"
        )
    if evaluated is not None:
        names = [env.resolved_name for env in evaluated.env if evaluated.num_examples_of(env) < 0]
        infinite = [name for name in names if environments[name].num_tasks is None]
        if infinite:
            raise RunError(
                f"orchestrator.eval.num_examples must be given for {', '.join(infinite)}, which never run out of tasks"
            )
