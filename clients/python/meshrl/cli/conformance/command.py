"""`meshrl conformance`: checks a server against the contract, and names each rule that it breaks."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import NoReturn

import click
import grpc

from meshrl.cli.command import CliError, folder_option, json_option, options_for, print_json, print_table
from meshrl.cli.conformance import every_service, publishing, rollout, trainer, weights
from meshrl.cli.conformance.every_service import look
from meshrl.cli.conformance.probe import CHECKS, NotCheckedError, Probe, RefusedError, RuleBrokenError, open_probe
from meshrl.cli.conformance.rules import EVERY, RULES
from meshrl.cli.run_folder import RunFolder
from meshrl.client.credentials import INSECURE, Credentials, default_credentials

MODULES = (every_service, rollout, trainer, weights, publishing)
"""What has the checks, which register themselves."""
CONFORMS, BROKEN, UNREACHABLE = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """What the check of a rule found: `keeps`, `breaks` or `not checked`, and why where it does not keep it."""

    rule: str
    result: str
    sentence: str
    found: str = ""


async def examine_server(
    address: str, service: str, *, full: bool, deadline_s: float, credentials: Credentials = INSECURE
) -> list[RuleResult]:
    """Checks every rule of a service in turn.

    Raises TimeoutError where nothing speaks gRPC at the address, and CliError where the server does not know us.
    """
    probe = await open_probe(address, service, credentials=credentials, deadline_s=deadline_s, full=full)
    results = []
    try:
        await _be_let_in(probe)
        for name, rule in RULES.items():
            if service in rule.services and (full or not rule.full):
                results.append(await _result(name, probe))
    finally:
        await probe.channel.close()
    return results


async def _be_let_in(probe: Probe) -> None:
    method, request = look(probe.service)
    try:
        await probe.call(method, request)
    except (RefusedError, NotCheckedError):
        if probe.refusals and probe.refusals[-1].code is grpc.StatusCode.UNAUTHENTICATED:
            raise CliError(
                f"the server at {probe.address} does not know who calls: name the run's folder with -o, or a token's"
                " file in MESHRL_TLS_TOKEN"
            ) from None
    probe.refusals.clear()


async def _result(name: str, probe: Probe) -> RuleResult:
    said = {"rule": name, "sentence": RULES[name].sentence}
    try:
        await asyncio.wait_for(CHECKS[name](probe), 3 * probe.deadline_s)
    except NotCheckedError as why:
        return RuleResult(result="not checked", found=str(why), **said)
    except RuleBrokenError as found:
        return RuleResult(result="breaks", found=str(found), **said)
    except RefusedError as refusal:
        if refusal.code is grpc.StatusCode.UNIMPLEMENTED:
            return RuleResult(result="not checked", found=f"{refusal.method} is not offered", **said)
        return RuleResult(result="breaks", found=str(refusal), **said)
    except TimeoutError:
        return RuleResult(result="breaks", found=f"no answer within {3 * probe.deadline_s:g} s", **said)
    return RuleResult(result="keeps", **said)


def _cannot_reach(why: str) -> NoReturn:
    click.echo(f"Error: {why}", err=True)
    raise SystemExit(UNREACHABLE)


def _show(results: list[RuleResult]) -> None:
    print_table(("rule", "", "what was found"), [(one.rule, one.result, one.found) for one in results])
    for one in results:
        if one.result == "breaks":
            click.echo(f"\n{one.rule}: {one.sentence}\n  found: {one.found}")


@click.command(name="conformance")
@folder_option
@click.option("--address", required=True, metavar="HOST:PORT", help="The server.")
@click.option("--service", required=True, type=click.Choice(EVERY), help="Which service of the contract it is.")
@click.option("--full", is_flag=True, help="Also what changes the server: for one that is started for this alone.")
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=0.5), default=20.0, show_default=True,
              help="Seconds for one call.")  # fmt: skip
@json_option
def conformance(folder: RunFolder, address: str, service: str, full: bool, deadline_s: float, as_json: bool) -> None:
    """Check a server, in whatever language, against the contract of a service (docs/contract.md).

    What is checked by default is safe on a live run: calls that only look, or that the contract says must be refused.
    --full plays rollouts, trains a step and saves a checkpoint, or publishes versions in a new epoch, which takes a
    run away from its trainer: use it on a server that is started for this alone. Credentials are those of the run's
    folder (-o), or of MESHRL_TLS_ variables.

    \b
    Exit codes: 0 it keeps every rule that was checked; 1 it breaks one; 2 it cannot be reached.
    """
    credentials = options_for(folder).credentials or default_credentials()
    try:
        results = asyncio.run(
            examine_server(address, service, full=full, deadline_s=deadline_s, credentials=credentials)
        )
    except TimeoutError:
        why = f"no gRPC server answers at {address} within {deadline_s:g} s: start it, or correct --address"
        _cannot_reach(why)
    except CliError as error:
        _cannot_reach(error.message)
    broken = [one for one in results if one.result == "breaks"]
    if as_json:
        print_json({"address": address, "service": service, "full": full, "conforms": not broken,
                    "rules": [asdict(one) for one in results]})  # fmt: skip
    else:
        _show(results)
        kept = sum(one.result == "keeps" for one in results)
        skipped = len(results) - kept - len(broken)
        click.echo(f"\n{service} at {address}: {kept} rules kept, {len(broken)} broken, {skipped} not checked")
    raise SystemExit(BROKEN if broken else CONFORMS)
