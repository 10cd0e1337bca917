"""`meshrl status`: every service of a run, its version, and how far behind that is.

Services are asked at once; one that does not answer is a row with the reason. The orchestrator serves nothing: its
files show its state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshrl.cli.command import ago, folder_option, json_option, print_json, print_table, run
from meshrl.cli.run_folder import RunFolder
from meshrl.wire.program_state import ProgramState, run_line
from meshrl.wire.values import JsonObject

if TYPE_CHECKING:  # gRPC and what goes with it take half a second to import: where there is nobody to ask, nobody waits
    from meshrl.client import ChannelOptions
    from meshrl.wire.types import RolloutStatus

SCHEMA = Path(__file__).with_name("status.schema.json")
LATE_S = 1.0
ANSWER_S = 3.0


@dataclass(frozen=True, kw_only=True)
class ServiceRow:
    """`lag` is in versions behind the trainer, None if unknown. The orchestrator's row is of its last step, as that
    ended."""

    service: str
    address: str
    state: str
    version: int | None = None
    lag: int | None = None
    detail: str = ""
    figures: JsonObject = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        takes_requests = bool(self.figures.get("routable"))  # an engine, also while it prepares a version
        return takes_requests or self.state in ("serving", "running", "ready")


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    output_dir: str
    step: int | None
    max_steps: int | None
    headline: str
    rows: tuple[ServiceRow, ...]
    waiting: str = ""
    """Who waits for whom, and programs in trouble."""
    ended_by: str = ""
    programs: tuple[ProgramState, ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether all answer, and no program is in trouble."""
        in_trouble = any(program.trouble(time.time()) for program in self.programs)
        return bool(self.rows) and all(row.is_well for row in self.rows) and not in_trouble


async def read_status(folder: RunFolder) -> RunStatus:
    """Asks every service that the folder names."""
    asked: list[Awaitable[list[ServiceRow]]] = [
        _ask(folder, service, address, ask)
        for service, ask in (
            ("rollout", _rollout),
            ("exchange", _dialled_in),
            ("trainer", _trainer),
            ("weights", _weights),
        )
        for address in folder.addresses(service)
    ]
    rows = [row for answer in await asyncio.gather(*asked) for row in answer]
    last, now_s = folder.last_step(), time.time()
    running, disk = folder.is_running(), folder.disk_trouble()
    if orchestrator := _orchestrator(folder, last, now_s, running=running):
        if orchestrator.state == "ended":  # its services went with it, but for those that serve others too
            rows = [row for row in rows if row.state != "not answering"]
        rows.append(orchestrator)
    states = folder.states() if running else {}
    newest = next((row.version for row in rows if row.service == "trainer" and row.version is not None), None)
    step = None if last is None else int(last["step"])
    max_steps = folder.config("orchestrator").get("max_steps")
    return RunStatus(
        output_dir=str(folder.path),
        step=step,
        max_steps=max_steps if isinstance(max_steps, int) else None,
        headline=_headline(folder, last, now_s, running=running),
        rows=tuple(_behind(row, newest) for row in rows),
        waiting="; ".join(filter(None, (run_line(states, now_s), disk if running else ""))),
        ended_by="" if running else (folder.why_it_ended() or disk),
        programs=tuple(states.values()),
    )


async def _ask(
    folder: RunFolder, service: str, address: str, ask: Callable[[str, ChannelOptions], Awaitable[list[ServiceRow]]]
) -> list[ServiceRow]:
    from meshrl.client import ChannelOptions
    from meshrl.client.credentials import CredentialError
    from meshrl.wire.errors import MeshError

    try:
        options = ChannelOptions(unary_deadline_s=ANSWER_S, retry_attempts=2, credentials=folder.credentials())
        return await ask(address, options)
    except MeshError as error:
        # gRPC names the address again, and each of its attempts; the cause comes last.
        detail = error.message.rpartition("last error: ")[2].rpartition("connect to remote host: ")[2]
        return [ServiceRow(service=service, address=address, state="not answering", detail=detail)]
    except CredentialError as error:
        return [ServiceRow(service=service, address=address, state="not asked", detail=str(error))]


async def _rollout(address: str, options: ChannelOptions) -> list[ServiceRow]:
    from meshrl.client import RolloutClient

    async with RolloutClient(address, options) as client:
        return [_rollout_row(address, await client.get_status())]


async def _dialled_in(address: str, options: ChannelOptions) -> list[ServiceRow]:
    from meshrl.client.exchange import ExchangeClient
    from meshrl.wire import convert
    from meshrl.wire.types import RolloutStatus

    async with ExchangeClient(address, options) as client:
        workers = await client.list_workers()
    rows = []
    for worker in workers:
        row = _rollout_row(f"exchange/{worker.worker}", convert.from_proto(RolloutStatus, worker.status))
        hosted = {"environments": list(worker.environments), "silent_s": worker.silent_s}
        row = replace(row, figures={**row.figures, **hosted})
        if not worker.attached:
            row = replace(row, state="away", detail=f"nothing heard for {ago(worker.silent_s)}, {worker.calls} groups")
        elif worker.left_out:
            row = replace(row, detail=f"{row.detail}; {worker.left_out}")
        rows.append(row)
    return rows


def _rollout_row(address: str, status: RolloutStatus) -> ServiceRow:
    versions = [engine.version for engine in status.engines if engine.healthy and engine.version is not None]
    healthy = sum(engine.healthy for engine in status.engines)
    failed = sum(status.failures.values())
    detail = (
        f"{status.running} running, {status.queued} queued, {status.rollouts_per_s:.1f} rollouts/s,"
        f" {failed} failed, {healthy} of {len(status.engines)} engines"
    )
    figures = {
        "running": status.running,
        "queued": status.queued,
        "finished": status.finished,
        "failures": dict(status.failures),
        "rollouts_per_s": status.rollouts_per_s,
    }
    state = "draining" if status.draining else "serving" if healthy else "without engines"
    version = min(versions, default=None)
    return ServiceRow(service="rollout", address=address, state=state, version=version, detail=detail, figures=figures)


async def _trainer(address: str, options: ChannelOptions) -> list[ServiceRow]:
    from meshrl.client import TrainerClient

    async with TrainerClient(address, options) as client:
        info = await client.get_trainer()
    return [
        ServiceRow(
            service="trainer",
            address=address,
            state="serving",
            version=run.version,
            lag=0,
            detail=f"run {run.run_id}: step {run.step}, epoch {run.epoch},"
            f" {f'checkpoint of step {run.durable_step}' if run.durable_step else 'no checkpoint'},"
            f" {info.objective}, {info.world_size} rank(s)"
            + (f", suspended: {run.suspension}" if run.suspension else ""),
            figures={"model": info.model, **asdict(run), "phase": run.phase.value},
        )
        for run in info.runs
    ]


async def _weights(address: str, options: ChannelOptions) -> list[ServiceRow]:
    from meshrl.client import WeightSyncClient

    async with WeightSyncClient(address, options) as client:
        engines = await client.list_engines()
    routable = sum(engine.routable for engine in engines)
    hub = ServiceRow(
        service="weights",
        address=address,
        state="serving",
        detail=f"{routable} of {len(engines)} engines take requests",
    )
    rows = [hub]
    for engine in engines:
        fault = f", last fault: {engine.last_fault.message}" if engine.last_fault else ""
        asleep = ", asleep" if engine.sleeping else ""
        runs = [f"{held.run_id}@{held.version}" for held in engine.served if held.newest]
        serves = f", serves {', '.join(runs)}" if len(runs) > 1 else ""
        rows.append(
            ServiceRow(
                service="engine",
                address=engine.url,
                state=engine.state.value,
                version=engine.serving_version,
                detail=f"{engine.engine_id}, seen {ago(engine.last_seen_s)} ago{serves}{asleep}{fault}",
                figures={
                    "engine_id": engine.engine_id,
                    "pool": engine.engine_pool,
                    "host": engine.host,
                    "routable": engine.routable,
                    "serves": {held.run_id: held.version for held in engine.served if held.newest},
                },
            )
        )
    return rows


def _orchestrator(folder: RunFolder, last: JsonObject | None, now_s: float, *, running: bool) -> ServiceRow | None:
    if not folder.config("orchestrator"):
        return None
    if last is None:
        state = "running" if running else "ended"
        return ServiceRow(service="orchestrator", address="-", state=state, detail="no step has ended yet")
    age_s = folder.metrics_age_s(now_s) or 0.0
    active = last.get("policy/active_version")
    detail = (
        f"step {last['step']} ended {ago(age_s)} ago, {ago(last['time/step'])} after the one before;"
        f" its rollouts were waited for {ago(last.get('time/wait_for_rollouts', 0.0))};"
        f" reward {last.get('reward/all/mean', float('nan')):.3f}"
    )
    return ServiceRow(
        service="orchestrator",
        address="-",
        state="running" if running else "ended",
        version=None if active is None else int(active),
        lag=None if active is None else max(0, int(last["step"]) - int(active)),
        detail=detail,
        figures={"age_s": age_s, "lag_s": last.get("weights/lag_s")},
    )


def _behind(row: ServiceRow, newest: int | None) -> ServiceRow:
    if newest is None or row.version is None or row.lag is not None:
        return row
    return replace(row, lag=max(0, newest - row.version))


def _headline(folder: RunFolder, last: JsonObject | None, now_s: float, *, running: bool) -> str:
    of = folder.config("orchestrator").get("max_steps")
    over = "finished" if last is not None and last["step"] == of else "not running"
    parts = ["running" if running else over]
    if last is None and folder.config("rl") and not folder.config("orchestrator"):
        runs = folder.runs
        parts.append(f"a mesh; its runs are in {', '.join(runs)}" if runs else "a mesh without a run")
    elif last is None:
        parts.append("no step has ended yet")
    else:
        parts.append(f"step {last['step']}" + (f" of {of}" if isinstance(of, int) else ""))
        parts.append(f"{ago(folder.metrics_age_s(now_s) or 0.0)} ago")
    return f"{folder.path}: {', '.join(parts)}"


def show(status: RunStatus) -> None:
    click.echo(status.headline)
    if status.waiting:
        click.echo(f"now: {status.waiting}")
    if status.ended_by:
        click.echo(f"it ended by: {status.ended_by}")
    rows = [(row.service, row.address, row.state, row.version, row.lag, row.detail) for row in status.rows]
    print_table(("service", "address", "state", "version", "lag", "what it does"), rows)
    late = [program for program in status.programs if program.loop_lag_s > LATE_S]
    for program in late:
        click.echo(f"the event loop of {program.program} answers {program.loop_lag_s:.1f} s late")


def status_schema() -> str:
    return SCHEMA.read_text()


def _print_schema(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(status_schema(), nl=False)
        context.exit()


@click.command()
@folder_option
@json_option
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
              help="Print the JSON schema of --json, and end.")  # fmt: skip
def status(folder: RunFolder, as_json: bool) -> None:
    """Show every service of a run, its version, and how many versions it is behind the trainer.

    Exits with 1 when a service does not answer or is not ready.
    """
    now = run(read_status(folder))
    if as_json:
        print_json({**asdict(now), "well": now.is_well})
    elif not now.rows:
        click.echo(f"{folder.path} holds no run: name its output folder with -o", err=True)
    else:
        show(now)
    raise SystemExit(0 if now.is_well else 1)
