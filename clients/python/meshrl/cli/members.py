"""`meshrl run init`, `meshrl token` and `meshrl join`: the members of a run."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from meshrl.cli import command
from meshrl.cli.command import CliError, HostPort, ago, folder_option, json_option, print_json, print_table
from meshrl.cli.run_folder import RunFolder
from meshrl.client.authority import Authority
from meshrl.client.credentials import TRUST_FILE
from meshrl.client.enrollment import join as join_run
from meshrl.client.names import named_by_host
from meshrl.client.trust import KnownToken, Role, TrustFile

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if found is None:
            self.fail(f"{value!r} is no duration; write it as 30m, 1h or 7d", param, context)
        return float(found[1]) * _UNITS_S[found[2]]


@click.command()
@folder_option
@click.option("--run-id", default="main", show_default=True, help="The run's name, which its certificates carry.")
def init(folder: RunFolder, run_id: str) -> None:
    """Make the authority of a run, in OUTPUT_DIR/credentials: its programs then know each other by certificates."""
    if folder.is_running():
        raise CliError(
            f"the run in {folder.path} goes on, and its programs take certificates at their start alone: end it first"
        )
    with _explained():
        authority = Authority.create(folder.path / "credentials", run_id)
    click.echo(f"the authority of the run {run_id!r} is in {authority.folder}; keep its ca.key to yourself")
    click.echo(f"its key's hash: {authority.fingerprint}")


@click.group()
def token() -> None:
    """Make, list and revoke the tokens by which hosts join a run, or show who they are."""


@token.command()
@folder_option
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True, help="What it is good for.")
@click.option("--ttl", type=_Duration(), default="1h", show_default=True, help="How long: 30m, 1h, 7d.")
@click.option("--host", "hosts", multiple=True,
              help="A name, an address or a network (10.1.0.0/16) at which its bearers serve; repeatable. Their"
              " certificates name no other.")  # fmt: skip
@click.option("--runs", multiple=True, metavar="PATTERN",
              help="The runs that its bearer may name, such as 'team-a-*'; repeatable. Left out, all.")  # fmt: skip
@click.option("--max-runs", type=click.IntRange(min=1), help="Most runs that it may have in the trainer at once.")
@click.option("--tokens-per-day", type=click.IntRange(min=1), help="Most tokens that the trainer trains for it a day.")
def create(
    folder: RunFolder,
    role: str,
    ttl: float,
    hosts: tuple[str, ...],
    runs: tuple[str, ...],
    max_runs: int | None,
    tokens_per_day: int | None,
) -> None:
    """Make a token, ID.SECRET, and print it with the hash of the authority's key. It is not shown again."""
    place = folder.path / "credentials"
    with _explained():
        ca_hash = Authority(place).fingerprint if (place / "ca.key").exists() else ""
        made = TrustFile(place / TRUST_FILE).add_token(
            Role(role), ttl, hosts=hosts, runs=runs, max_runs=max_runs, tokens_per_day=tokens_per_day
        )
    click.echo(f"token    {made}")
    if ca_hash:  # of a run without an authority, a token only shows who calls
        click.echo(f"ca-hash  {ca_hash}")


@token.command("list")
@folder_option
@json_option
def list_tokens(folder: RunFolder, as_json: bool) -> None:
    """List the run's tokens, without their secrets, and the members that joined by each."""
    with _explained():
        trust = TrustFile(folder.path / "credentials" / TRUST_FILE).read()
    members: dict[str, list[tuple[str, str]]] = {}
    for member, by in sorted(trust.came_by.items()):
        members.setdefault(by.id, []).append(member)
    if as_json:
        print_json([
            {
                "id": each.id, "role": each.role.value, "expires_s": each.expires_s, "revoked": each.revoked,
                **asdict(each.scope),
                "members": [{"role": role, "name": name, "revoked": (role, name) in trust.revoked}
                            for role, name in members.get(each.id, ())],
            }
            for each in trust.tokens.values()
        ])  # fmt: skip
        return
    now_s = time.time()
    print_table(
        ("token", "role", "state", "hosts", "runs", "members"),
        (
            (
                each.id,
                each.role.value,
                _state(each, now_s),
                ", ".join(each.scope.hosts) or "-",
                ", ".join(each.scope.runs) or "all",
                ", ".join(
                    f"{role}/{name}{' (revoked)' * ((role, name) in trust.revoked)}"
                    for role, name in members.get(each.id, ())
                ) or "-",
            )
            for each in trust.tokens.values()
        ),
    )  # fmt: skip


def _state(known: KnownToken, now_s: float) -> str:
    if known.revoked:
        return "revoked"
    if known.expires_s is None:
        return "valid"
    left_s = known.expires_s - now_s
    return f"valid for {ago(left_s)}" if left_s > 0 else "expired"


@token.command()
@folder_option
@click.argument("what", metavar="ID|ROLE/NAME")
def revoke(folder: RunFolder, what: str) -> None:
    """Revoke a token with all members that joined by it, or one member. Its calls, and calls to it, end within seconds.

    Members of other roles with the same names are revoked with the token.
    """
    with _explained():
        revoked = TrustFile(folder.path / "credentials" / TRUST_FILE).revoke(what)
    if not revoked:
        raise CliError(f"the run has no token or member {what!r}; a token is named by what comes before its dot")
    click.echo(f"revoked: {', '.join(revoked)}")


@click.command()
@click.argument("address", type=HostPort(), metavar="HOST:PORT")
@click.option("--token", "shown", envvar="MESHRL_JOIN_TOKEN", required=True,
              help="The token, ID.SECRET; MESHRL_JOIN_TOKEN keeps it out of the list of processes.")  # fmt: skip
@click.option("--ca-hash", required=True, help="sha256:HEX, as it came with the token.")
@click.option("--folder", "place", type=click.Path(file_okay=False, path_type=Path), default="credentials",
              show_default=True, help="Where to put the credentials.")  # fmt: skip
@click.option("--name", default=None, help="What this member is called; left out, as its host.")
@click.option(
    "--host", "hosts", multiple=True, help="One of the token's hosts that the certificate is to name; left out, all."
)
def join(address: str, shown: str, ca_hash: str, place: Path, name: str | None, hosts: tuple[str, ...]) -> None:
    """Join the run whose hub lets hosts in at HOST:PORT: get a certificate for a day, which programs then renew."""
    if not re.fullmatch("sha256:[0-9a-f]{64}", ca_hash):
        raise click.UsageError(f"--ca-hash: expected sha256: and 64 hexadecimal digits, got {ca_hash!r}")
    called = name or named_by_host()
    try:
        run_id, role = command.run(join_run(place, address, token=shown, ca_hash=ca_hash, name=called, hosts=hosts))
    except (ValueError, OSError, sqlite3.Error) as error:
        raise CliError(str(error)) from error
    click.echo(f"{role}/{called} has joined the run {run_id!r}; start its program with --tls.folder {place}")


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # an AuthorityError, or a name that is none
        raise CliError(str(error)) from error
    except (OSError, sqlite3.Error) as error:
        raise CliError(
            f"the run's credentials cannot be used ({error}); name its folder with -o, as its owner"
        ) from error
