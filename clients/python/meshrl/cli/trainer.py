"""`meshrl trainer`: has a trainer save a checkpoint, or finish what it has and stop."""

from __future__ import annotations

import click

from meshrl.cli.command import address_option, folder_option, json_option, options_for, print_json, run, the_address
from meshrl.cli.run_folder import RunFolder
from meshrl.client import TrainerClient


def drain_trainer(folder: RunFolder, address: str | None, deadline_s: float) -> int:
    """Has a run's trainer train what it has and take no more; returns the step that it ended with. Raises CliError."""

    async def finish() -> int:
        async with TrainerClient(the_address(folder, "trainer", address), options_for(folder)) as client:
            return await client.drain(deadline_s)

    return run(finish())


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

    async def save() -> tuple[int, str]:
        async with TrainerClient(the_address(folder, "trainer", address), options_for(folder)) as client:
            return await client.save_checkpoint(run_id, weights_only)

    step, path = run(save())
    if as_json:
        print_json({"step": step, "path": path})
    else:
        click.echo(f"step {step} is saved in {path} (on the trainer's file system)")


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
