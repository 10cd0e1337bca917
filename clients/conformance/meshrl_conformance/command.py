"""`meshrl conformance`: lists the rules that a server breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from typing import NoReturn

import click
import grpc

from meshrl.cli.command import CliError, HostPort, folder_option, json_option, options_for, print_json, print_table
from meshrl.cli.run_folder import RunFolder
from meshrl.client.credentials import INSECURE, Credentials, default_credentials
from meshrl_conformance import every_service, publishing, rollout, trainer, weights
from meshrl_conformance.every_service import look
from meshrl_conformance.exchange import WORKER_CHECKS, WORKER_RULES, waiting_for_worker
from meshrl_conformance.probe import CHECKS, NotCheckedError, Probe, RefusedError, RuleBrokenError, open_probe
from meshrl_conformance.rules import EVERY, RULES

MODULES = (every_service, rollout, trainer, weights, publishing)
"""Their checks register themselves."""
EXCHANGE = "exchange"
CONFORMS, BROKEN, UNREACHABLE = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """`result` is `keeps`, `breaks` or `not checked`, with the reason of the last two in `found`."""

    rule: str
    result: str
    sentence: str
    found: str = ""


async def examine_server(
    address: str, service: str, *, full: bool, deadline_s: float, credentials: Credentials = INSECURE
) -> list[RuleResult]:
    """Raises TimeoutError where nothing speaks gRPC, and CliError where the server does not know us."""
    probe = await open_probe(address, service, credentials=credentials, deadline_s=deadline_s, full=full)
    results = []
    try:
        await _be_let_in(probe)
        for name, rule in RULES.items():
            if service in rule.services and (full or not rule.full):
                results.append(await _result(name, rule.sentence, CHECKS[name](probe), deadline_s))
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


async def examine_worker(
    address: str, *, full: bool, deadline_s: float, credentials: Credentials = INSECURE
) -> list[RuleResult]:
    """The worker dials in at `address`. Raises TimeoutError where none does, and RuntimeError where nobody can
    listen."""
    waiting = waiting_for_worker(address, full=full, deadline_s=deadline_s, credentials=credentials)
    async with waiting as probe:
        results = []
        for name, sentence in WORKER_RULES.items():
            results.append(await _result(name, sentence, WORKER_CHECKS[name](probe), deadline_s))
            await probe.next_stream()
        return results


async def _result(name: str, sentence: str, checking: Awaitable[None], deadline_s: float) -> RuleResult:
    said = {"rule": name, "sentence": sentence}
    try:
        await asyncio.wait_for(checking, 3 * deadline_s)
    except NotCheckedError as why:
        return RuleResult(result="not checked", found=str(why), **said)
    except RuleBrokenError as found:
        return RuleResult(result="breaks", found=str(found), **said)
    except RefusedError as refusal:
        if refusal.code is grpc.StatusCode.UNIMPLEMENTED:
            return RuleResult(result="not checked", found=f"{refusal.method} is not offered", **said)
        return RuleResult(result="breaks", found=str(refusal), **said)
    except TimeoutError:
        return RuleResult(result="breaks", found=f"no answer within {3 * deadline_s:g} s", **said)
    return RuleResult(result="keeps", **said)


def _cannot_reach(why: str) -> NoReturn:
    click.echo(f"Error: {why}", err=True)
    raise SystemExit(UNREACHABLE)


@click.command(name="conformance")
@folder_option
@click.option("--address", type=HostPort(), required=True, metavar="HOST:PORT",
              help="The server; of exchange, where to listen.")  # fmt: skip
@click.option("--service", required=True, type=click.Choice((*EVERY, EXCHANGE)),
              help="Which service of the contract it is; exchange: a rollout worker that dials in.")  # fmt: skip
@click.option("--full", is_flag=True, help="Also what changes the server: for one that is started for this alone.")
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=0.5), default=20.0, show_default=True,
              help="Seconds for one call.")  # fmt: skip
@json_option
def conformance(folder: RunFolder, address: str, service: str, full: bool, deadline_s: float, as_json: bool) -> None:
    """Check a server, in whatever language, against the contract of a service (docs/contract.md).

    What is checked by default is safe on a live run: calls that only look, or that must be refused.
    --full plays rollouts, trains a step and saves a checkpoint, or publishes versions in a new epoch, which takes a
    run away from its trainer: use it on a server that is started for this alone. Credentials are those of the run's
    folder (-o), or of MESHRL_TLS_ variables.

    With --service exchange it is the other way round: this command listens at --address for up to --deadline, and the
    rollout worker is started with that as its exchange.address.

    \b
    Exit codes: 0 it keeps every rule that was checked, 1 it breaks one, 2 it cannot be reached.
    """
    if service == EXCHANGE:
        examining = examine_worker(address, full=full, deadline_s=deadline_s, credentials=default_credentials())
        why = f"no worker has dialled in at {address} within {deadline_s:g} s: start it with that exchange.address"
    else:
        credentials = options_for(folder).credentials or default_credentials()
        examining = examine_server(address, service, full=full, deadline_s=deadline_s, credentials=credentials)
        why = f"no gRPC server answers at {address} within {deadline_s:g} s: start it, or correct --address"
    try:
        results = asyncio.run(examining)
    except TimeoutError:
        _cannot_reach(why)
    except RuntimeError as error:
        _cannot_reach(f"nobody can listen at {address}: {error}; free it, or correct --address")
    except CliError as error:
        _cannot_reach(error.message)
    broken = [one for one in results if one.result == "breaks"]
    if as_json:
        print_json({"address": address, "service": service, "full": full, "conforms": not broken,
                    "rules": [asdict(one) for one in results]})  # fmt: skip
    else:
        print_table(("rule", "", "what was found"), [(one.rule, one.result, one.found) for one in results])
        for one in results:
            if one.result == "breaks":
                click.echo(f"\n{one.rule}: {one.sentence}\n  found: {one.found}")
        kept = sum(one.result == "keeps" for one in results)
        skipped = len(results) - kept - len(broken)
        click.echo(f"\n{service} at {address}: {kept} rules kept, {len(broken)} broken, {skipped} not checked")
    raise SystemExit(BROKEN if broken else CONFORMS)
