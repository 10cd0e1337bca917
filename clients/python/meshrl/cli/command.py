"""What commands share: options, calls of a service, and errors of one line with a remedy."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack

import click

from meshrl.cli.run_folder import RunFolder
from meshrl.machine.addresses import checked_address
from meshrl.wire.text_table import plain_table

if TYPE_CHECKING:
    from meshrl.client.channel import ChannelOptions, ServiceClient

_T = TypeVar("_T")
_Client = TypeVar("_Client", bound="ServiceClient")
_Command = Callable[..., object]

CALL_DEADLINE_S = 10.0
REMEDIES = {
    "UNREACHABLE": "start the service, or name another with --address, or its run's folder with -o",
    "DEADLINE_PASSED": "it may be busy: see `meshrl status`, and try again",
    "NOT_SUPPORTED": "another service or an older release is there: correct --address, or update it",
    "DRAINING": "it is ending: start it again, or name another with --address",
    "INTERNAL": "its log has the traceback: `meshrl logs`",
}
"""For errors whose service names none."""
CLOSED_REMEDY = (
    "if it has certificates, it closes calls without one: name the run's folder with -o, or the folder of `meshrl join`"
    " in MESHRL_TLS_FOLDER; else see its log"
)
"""For a server that closes the connection before any answer."""
PLAIN_REMEDY = (
    "the server uses no TLS, and the credentials of this call are certificates: correct --address, name its own run's"
    " folder with -o, or unset MESHRL_TLS_ variables"
)
"""For a TLS handshake that is answered in plain text."""


class CliError(click.ClickException):
    """The message names the remedy. Exit code 1."""


class UsageLineError(click.ClickException):
    """One line, without click's usage. Exit code 2."""

    exit_code = 2

    def __init__(self, error: click.UsageError, command_path: str) -> None:
        path = error.ctx.command_path if error.ctx is not None else command_path
        said = " ".join(error.format_message().split()).removesuffix(".")
        super().__init__(f"{said}; see {path} --help")


class HostPort(click.ParamType[str]):
    name = "HOST:PORT"

    def convert(self, value: str, param: click.Parameter | None, context: click.Context | None) -> str:
        try:
            return checked_address(value)
        except ValueError as error:
            self.fail(str(error), param, context)


def folder_option(command: _Command) -> _Command:
    """The run's folder, handed over as a RunFolder."""
    return click.option(
        "-o", "--output-dir", "folder", type=click.Path(file_okay=False, path_type=Path),
        callback=lambda context, option, path: RunFolder(path.expanduser()), default="outputs", show_default=True,
        envvar="MESHRL_OUTPUT_DIR", help="The run's output folder.",
    )(command)  # fmt: skip


def address_option(command: _Command) -> _Command:
    return click.option("--address", type=HostPort(), metavar="HOST:PORT",
                        help="The service, where no run's folder names it.")(command)  # fmt: skip


def json_option(command: _Command) -> _Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")(command)


def print_json(value: object) -> None:
    """Numbers that JSON does not have are null."""
    click.echo(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    click.echo(plain_table([[header.upper() for header in headers], *rows]))


def the_address(folder: RunFolder, service: str, address: str | None) -> str:
    """`address`, else the folder's first of the service. Raises CliError."""
    found = (address,) if address else folder.addresses(service)
    if not found:
        raise CliError(
            f"{folder.path} names no address of `{service}`: name the run's folder with -o, or the service with"
            " --address"
        )
    return found[0]


class _Changes(TypedDict, total=False):
    unary_deadline_s: float
    reconnect_s: float


def options_for(folder: RunFolder, **changes: Unpack[_Changes]) -> ChannelOptions:
    """With the run's credentials, if any. Raises CliError for unusable ones."""
    from meshrl.client.channel import ChannelOptions  # gRPC takes 0.1 s to import, which `--help` need not wait for
    from meshrl.client.credentials import CredentialError, default_credentials

    try:
        credentials = folder.credentials() or default_credentials()
    except CredentialError as error:
        raise CliError(str(error)) from error
    changes.setdefault("unary_deadline_s", CALL_DEADLINE_S)
    return ChannelOptions(credentials=credentials, **changes)


def run(work: Coroutine[None, None, _T]) -> _T:
    """Turns a failed call into a CliError with the service's own words."""
    import asyncio  # `--help` need not wait for it

    try:
        return asyncio.run(work)
    except Exception as error:
        from meshrl.wire.errors import MeshError  # with gRPC: nothing raises it that has not imported it

        if not isinstance(error, MeshError):
            raise
        # gRPC names the address, and each of its attempts; the cause comes last.
        said = " ".join(error.message.rpartition("last error: UNKNOWN: ")[2].split())
        said += "".join(f"; {one.field}: {one.description}" for one in error.violations)
        remedy = REMEDIES.get(error.reason.name)
        if said.endswith(": Socket closed"):  # that of a call under way is "Stream removed (Socket closed)"
            remedy = CLOSED_REMEDY
        elif "WRONG_VERSION_NUMBER" in said:
            remedy = PLAIN_REMEDY
        raise CliError(f"{error.reason.name}: {said}{f'; {remedy}' if remedy else ''}") from error


def ask(
    client: Callable[[str, ChannelOptions], _Client],
    service: str,
    folder: RunFolder,
    address: str | None,
    question: Callable[[_Client], Awaitable[_T]],
) -> _T:
    """The answer of one service. Raises CliError."""

    async def asked() -> _T:
        async with client(the_address(folder, service, address), options_for(folder)) as opened:
            return await question(opened)

    return run(asked())


def ago(seconds: float) -> str:
    if seconds < 60.0:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
