"""`meshrl weights`: versions at the hub, the engines that serve them, and kept steps."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict

import click

from meshrl.cli.command import (
    CliError,
    address_option,
    ago,
    ask,
    folder_option,
    json_option,
    options_for,
    print_json,
    print_table,
    run,
    the_address,
)
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.trainer import drain_trainer
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.weights import EVERY_RUN
from meshrl.wire.saved_steps import pin_step, pinned_steps, unpin_step
from meshrl.wire.types import VersionInfo

REACH_S = 3.0
QUIET_S = 0.5
"""The hub's watch sends the past at once: this silence ends it."""


step_argument = click.argument("step", type=click.IntRange(min=1))


async def _versions(address: str, run_id: str, options: ChannelOptions) -> list[VersionInfo]:
    newest: dict[tuple[str, int, int], VersionInfo] = {}
    async with WeightSyncClient(address, options) as client:
        await client.wait_until_serving(REACH_S)
        async with aclosing(client.watch_versions(run_id)) as events:
            with suppress(TimeoutError, StopAsyncIteration):  # no more of them
                while True:
                    version = (await asyncio.wait_for(anext(events), QUIET_S)).version
                    newest[version.run_id, version.epoch, version.version] = version
    return sorted(newest.values(), key=lambda version: (version.run_id, version.epoch, version.version))


@click.group()
def weights() -> None:
    """Look at weight versions and the engines that serve them; keep a step, and go back to it."""


@weights.command(name="list")
@folder_option
@address_option
@click.option("--run-id", default=EVERY_RUN, help="Only the versions of this run.")
@json_option
def list_versions(folder: RunFolder, address: str | None, run_id: str, as_json: bool) -> None:
    """List the versions that the hub remembers, oldest first."""
    found = run(_versions(the_address(folder, "weights", address), run_id, options_for(folder, reconnect_s=0.0)))
    if as_json:
        print_json(
            [
                {**asdict(version), "state": version.state.value, "transport": version.transport.value}
                for version in found
            ]
        )
        return
    rows = [
        (version.run_id, version.epoch, version.version, version.state.value, f"{version.num_bytes / 1e6:.1f} MB",
         version.transport.value, version.artifact_id[:16])
        for version in found
    ]  # fmt: skip
    print_table(("run", "epoch", "version", "state", "size", "transport", "artifact"), rows)


@weights.command()
@folder_option
@address_option
@click.option("--pool", default="", help="Only the engines of this pool.")
@json_option
def engines(folder: RunFolder, address: str | None, pool: str, as_json: bool) -> None:
    """List the engines that have registered at the hub, with the version that each serves."""
    found = ask(WeightSyncClient, "weights", folder, address, lambda client: client.list_engines(pool))
    if as_json:
        print_json([{**asdict(engine), "state": engine.state.value} for engine in found])
        return
    rows = [
        (engine.engine_id, engine.url, engine.engine_pool or "-", engine.state.value, engine.serving_version,
         "yes" if engine.routable else "no", ago(engine.last_seen_s),
         engine.last_fault.message if engine.last_fault else "")
        for engine in found
    ]  # fmt: skip
    print_table(("engine", "url", "pool", "state", "version", "takes requests", "seen", "last fault"), rows)


@weights.command()
@step_argument
@folder_option
@json_option
def pin(step: int, folder: RunFolder, as_json: bool) -> None:
    """Keep the saved files of STEP, overriding ckpt.keep_last."""
    _require_saved(folder, step, to_resume=False)
    with _changing(folder):
        pin_step(folder.weights, step)
    _tell_pinned(folder, as_json)


@weights.command()
@step_argument
@folder_option
@json_option
def unpin(step: int, folder: RunFolder, as_json: bool) -> None:
    """Give STEP free again: ckpt.keep_last may delete it."""
    with _changing(folder):
        unpin_step(folder.weights, step)
    _tell_pinned(folder, as_json)


@weights.command()
@step_argument
@folder_option
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=1.0), default=600.0, show_default=True,
              help="Seconds that the trainer may take for the batches it has.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask: a run that goes on ends with it.")
@json_option
def rollback(step: int, folder: RunFolder, deadline_s: float, yes: bool, as_json: bool) -> None:
    """End the run, and print the command that continues from STEP.

    Versions go forward only: the resumed run publishes the weights of STEP as its first version, and sets checkpoints
    of later steps aside. STEP is pinned, too.
    """
    _require_saved(folder, step, to_resume=True)
    running = folder.is_running()
    if running and not yes:
        click.confirm(f"the run in {folder.path} ends, to go on from step {step}; go on?", abort=True)
    with _changing(folder):
        pin_step(folder.weights, step)
    if running:
        drain_trainer(folder, None, deadline_s)
    configuration = folder.path / "configs" / "rl.toml"
    if configuration.exists():
        command = shlex.join(["rl", "@", str(configuration), "--ckpt.resume-step", str(step)])
    else:  # programs that were started by hand
        command = f"each program as it was started, the trainer with --ckpt.resume-step {step}"
    if as_json:
        print_json({"step": step, "ended": running, "command": command})
    else:
        ended = "the trainer has finished; when `meshrl status` says that the run has ended" if running else "now"
        click.echo(f"{ended}, go on from step {step} with: {command}")


def _tell_pinned(folder: RunFolder, as_json: bool) -> None:
    pinned = sorted(pinned_steps(folder.weights))
    if as_json:
        print_json({"pinned": pinned})
    else:
        click.echo(f"pinned steps, which ckpt.keep_last spares: {', '.join(map(str, pinned)) or 'none'}")


def _require_saved(folder: RunFolder, step: int, *, to_resume: bool) -> None:
    saved = folder.saved_steps(to_resume=to_resume)
    if step not in saved:
        what = "no checkpoint to resume from" if to_resume else "no weights"
        there = f"it has those of {', '.join(map(str, saved))}" if saved else "it has none; set ckpt.interval"
        raise CliError(f"{folder.path} has {what} of step {step}; {there}, or save now: meshrl trainer checkpoint")


@contextmanager
def _changing(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CliError(
            f"{folder.weights} cannot be changed: {error.strerror}; run this where the run's disk is"
        ) from None
