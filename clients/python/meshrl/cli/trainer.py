"""`meshrl trainer` and `meshrl run`: a trainer's checkpoints, end and runs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeVar

import click

from meshrl.cli.command import (
    address_option,
    ago,
    ask,
    folder_option,
    json_option,
    print_json,
    print_table,
    the_address,
)
from meshrl.cli.members import init
from meshrl.cli.run_folder import RunFolder
from meshrl.client import TrainerClient
from meshrl.wire.types import AdapterSpec, OptimizerSpec, RunInfo, RunSpec, StartPoint

_T = TypeVar("_T")


def _ask(folder: RunFolder, address: str | None, question: Callable[[TrainerClient], Awaitable[_T]]) -> _T:
    return ask(TrainerClient, "trainer", folder, address, question)


def drain_trainer(folder: RunFolder, address: str | None, deadline_s: float) -> int:
    """Returns its last step. Raises CliError."""
    return _ask(folder, address, lambda client: client.drain(deadline_s))


@click.group()
def trainer() -> None:
    """Drive the trainer: checkpoint, drain."""


@trainer.command()
@folder_option
@address_option
@click.option("--run-id", default="", help="The run to save; left out, the trainer's own.")
@click.option("--weights-only", is_flag=True, help="Only what an engine can serve, in Hugging Face's format.")
@json_option
def checkpoint(folder: RunFolder, address: str | None, run_id: str, weights_only: bool, as_json: bool) -> None:
    """Save a checkpoint now, between two steps, and print its place."""
    _save(folder, address, run_id, weights_only, as_json)


def _save(folder: RunFolder, address: str | None, run_id: str, weights_only: bool, as_json: bool, of: str = "") -> None:
    step, path = _ask(folder, address, lambda client: client.save_checkpoint(run_id, weights_only))
    if as_json:
        print_json({"step": step, "path": path})
    else:
        click.echo(f"step {step}{of} is saved in {path} (on the trainer's file system)")


@trainer.command()
@folder_option
@address_option
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=1.0), default=600.0, show_default=True,
              help="Seconds that the trainer may take for the batches it has.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask: the run ends with it.")
@json_option
def drain(folder: RunFolder, address: str | None, deadline_s: float, yes: bool, as_json: bool) -> None:
    """Have the trainer train the batches it has and take no more. The run ends with it."""
    where = the_address(folder, "trainer", address)
    if not yes:
        click.confirm(f"the trainer at {where} will take no more batches, and its run ends; go on?", abort=True)

    step = drain_trainer(folder, where, deadline_s)
    if as_json:
        print_json({"step": step})
    else:
        click.echo(f"the trainer finished step {step} and takes no more batches")


run_argument = click.argument("run_id", metavar="RUN")


@click.group(name="run")
def run_group() -> None:
    """Look at the runs of a trainer, add and end them; make a run's authority."""


run_group.add_command(init)


def _json(info: RunInfo) -> dict[str, object]:
    return {**asdict(info), "phase": info.phase.value}


@run_group.command(name="list")
@folder_option
@address_option
@json_option
def list_runs(folder: RunFolder, address: str | None, as_json: bool) -> None:
    """List the runs, a line each."""
    found = _ask(folder, address, lambda client: client.list_runs())
    if as_json:
        print_json([_json(info) for info in found])
        return
    rows = [
        (
            info.run_id,
            info.phase.value,
            info.step,
            info.version,
            None if info.spec is None or info.spec.share is None else f"{info.spec.share:g}",
            None if info.used_share is None else f"{info.used_share:.0%}",
            info.tokens,
            info.queued_batches,
            None if info.update_time is None else f"{ago(time.time() - info.update_time)} ago",
        )
        for info in found
    ]
    print_table(["run", "state", "step", "version", "share", "used", "tokens", "queued", "last step"], rows)


@run_group.command()
@folder_option
@address_option
@run_argument
@json_option
def show(folder: RunFolder, address: str | None, run_id: str, as_json: bool) -> None:
    """Show one run: its state, and how it is trained."""
    info = _ask(folder, address, lambda client: client.get_run(run_id))
    if as_json:
        print_json(_json(info))
        return
    lines: dict[str, object] = {
        "state": info.phase.value,
        "step": f"{info.step}, durable {info.durable_step}",
        "version": f"{info.version} of epoch {info.epoch}",
        "tokens": info.tokens,
    }
    if info.suspension is not None:
        lines["suspended"] = str(info.suspension)
    if info.spec is not None:
        parts = {name: value for name, value in asdict(info.spec).items() if value not in (None, {}, ())}
        lines |= {name: _in_words(value) for name, value in parts.items()}
    for name, value in lines.items():
        click.echo(f"{name:<20}{value}")


def _in_words(value: object) -> object:
    if not isinstance(value, dict):
        return getattr(value, "value", value)
    return ", ".join(f"{name} {one}" for name, one in value.items() if one not in (None, {}, ()))


@run_group.command()
@folder_option
@address_option
@run_argument
@click.option("--rank", type=click.IntRange(min=1), help="Rank of its adapter; left out, the trainer's own.")
@click.option("--alpha", type=click.FloatRange(min=0.0, min_open=True), help="Scale of the adapter; by default 2 rank.")
@click.option("--target", "targets", multiple=True, help="A layer with an adapter, such as q_proj; repeatable.")
@click.option("--lr", "learning_rate", type=click.FloatRange(min=0.0, min_open=True), help="Peak learning rate.")
@click.option("--share", type=click.FloatRange(min=0.0, min_open=True),
              help="Its share of the trainer's time, relative to the other runs' 1.")  # fmt: skip
@click.option("--start-from", metavar="RUN[@STEP]",
              help="Start from the newest checkpoint of another run, or that of the step.")  # fmt: skip
@click.option("--with-optimizer", is_flag=True,
              help="Go on with its optimizer, schedule and step as well, not its weights alone.")  # fmt: skip
@json_option
def create(
    folder: RunFolder,
    address: str | None,
    run_id: str,
    rank: int | None,
    alpha: float | None,
    targets: tuple[str, ...],
    learning_rate: float | None,
    share: float | None,
    start_from: str | None,
    with_optimizer: bool,
    as_json: bool,
) -> None:
    """Add a run to the trainer; what is left out is as in the trainer's own configuration."""
    if rank is None and (alpha is not None or targets):
        raise click.UsageError("--alpha and --target are of an adapter of its own: give its --rank as well")
    adapter = None if rank is None else AdapterSpec(rank=rank, alpha=alpha or 2.0 * rank, target_modules=targets)
    optimizer = None if learning_rate is None else OptimizerSpec(type="adamw", learning_rate=learning_rate)
    if with_optimizer and start_from is None:
        raise click.UsageError("--with-optimizer is of a run to start from: give --start-from as well")
    try:
        start = None if start_from is None else StartPoint.read(start_from, with_optimizer=with_optimizer)
    except ValueError as error:
        raise click.UsageError(f"--start-from: {error}") from error
    spec: RunSpec | None = RunSpec(adapter=adapter, optimizer=optimizer, share=share, start_from=start)
    spec = None if spec == RunSpec() else spec
    _told(_ask(folder, address, lambda client: client.create_run(run_id, spec)), as_json)


@run_group.command()
@folder_option
@address_option
@run_argument
@click.option("--message", default="", help="Why, for people who look at it.")
@json_option
def suspend(folder: RunFolder, address: str | None, run_id: str, message: str, as_json: bool) -> None:
    """Have the trainer finish the step of a run that trains, and take none of its batches until it is resumed."""
    _told(_ask(folder, address, lambda client: client.suspend_run(run_id, message)), as_json)


@run_group.command()
@folder_option
@address_option
@run_argument
@json_option
def resume(folder: RunFolder, address: str | None, run_id: str, as_json: bool) -> None:
    """End a suspension."""
    _told(_ask(folder, address, lambda client: client.resume_run(run_id)), as_json)


@run_group.command(name="checkpoint")
@folder_option
@address_option
@run_argument
@click.option("--weights-only", is_flag=True, help="Only what an engine can serve.")
@json_option
def checkpoint_run(folder: RunFolder, address: str | None, run_id: str, weights_only: bool, as_json: bool) -> None:
    """Save a checkpoint of a run now, between two of its steps, and print its place."""
    _save(folder, address, run_id, weights_only, as_json, of=f" of run {run_id}")


@run_group.command()
@folder_option
@address_option
@run_argument
@click.option("--keep-checkpoints", is_flag=True, help="Leave its checkpoints, from which a new run may start.")
@click.option("--yes", is_flag=True, help="Do not ask: the run ends with it.")
def delete(folder: RunFolder, address: str | None, run_id: str, keep_checkpoints: bool, yes: bool) -> None:
    """Remove a run from the trainer, and its versions from the engines."""
    if not yes:
        info = _ask(folder, address, lambda client: client.get_run(run_id))
        kept = "its checkpoints stay" if keep_checkpoints else "its checkpoints are deleted"
        click.confirm(f"the run {info.run_id} ends at step {info.step}, and {kept}; go on?", abort=True)
    _ask(folder, address, lambda client: client.delete_run(run_id, keep_checkpoints=keep_checkpoints))
    click.echo(f"the run {run_id} is deleted")


def _told(info: RunInfo, as_json: bool) -> None:
    if as_json:
        print_json(_json(info))
    else:
        click.echo(f"the run {info.run_id} is {info.phase.value} at step {info.step}")
