"""`meshrl ui`: opens the page over runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path

import click

from meshrl.cli.command import CliError
from meshrl.cli.run_folder import RunFolder
from meshrl.machine.addresses import address_of

LOOPBACK = ("127.0.0.1", "localhost", "::1")


DEEPEST = 3
"""Levels below a named folder in which runs are looked for."""


def runs_in(folder: Path) -> list[Path]:
    """The folder with the runs of its mesh if it is a run's, else the runs in it. Raises CliError without any."""
    if _is_run(folder):
        return [folder, *sorted(path for path in folder.glob("run_*") if _is_run(path))]
    found = [path for depth in range(1, DEEPEST + 1) for path in folder.glob("/".join("*" * depth)) if _is_run(path)]
    if not found:
        raise CliError(f"{folder} holds no run: name the output folder of one, such as outputs/demo/rl")
    return sorted(found)


def _is_run(folder: Path) -> bool:
    return (folder / "configs").is_dir()


@click.command()
@click.argument("output_dirs", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; elsewhere it asks for a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8780, show_default=True, help="0 takes a free one.")
def ui(output_dirs: tuple[Path, ...], host: str, port: int) -> None:
    """Show runs in a browser: curves, rollouts, a timeline, versions and the ledger.

    OUTPUT_DIRS are output folders of runs, their copies, or folders that hold some; by default ./outputs. Several can
    be compared.
    """
    runs = [RunFolder(found) for path in output_dirs or (Path("outputs"),) for found in runs_in(path)]
    try:
        from meshrl.cli.ui.server import serve
    except ModuleNotFoundError as error:
        raise CliError(f"the page needs {error.name}: pip install 'meshrl-client[ui]'") from error
    token = None if host in LOOPBACK else secrets.token_urlsafe(24)

    def ready(port: int) -> None:
        address = f"http://{address_of(host, port)}/"
        click.echo(f"open {address}{'' if token is None else f'?token={token}'}  (Ctrl-C ends it)")

    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(serve(runs, host=host, port=port, token=token, ready=ready))
        except OSError as error:
            raise CliError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
            ) from error
