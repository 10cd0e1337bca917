"""`meshrl rollouts`: the fate of each rollout, from the ledger, and the messages of kept ones."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

import click

from meshrl.cli.command import CliError, ago, folder_option, json_option, print_json, print_table
from meshrl.cli.run_folder import RunFolder
from meshrl.wire.values import JsonObject

FOLLOW_S = 1.0

_IN_LEDGER = {
    "in_flight": "dispatched", "ready": "finished",
    **{state: state for state in ("batched", "trained", "dropped", "failed", "cancelled")},
}  # fmt: skip
"""The ledger's name of each state."""

_ROW = """SELECT rollouts.rollout_id, rollouts.environment, rollouts.task_index, rollouts.state, rollouts.reason,
  rollouts.step, rollouts.oldest_version, rollouts.group_id, rollouts.updated_s, rollouts.key, rollouts.run,
  rollouts.trace_id FROM rollouts"""


def find_trace(folder: RunFolder, name: str) -> str | None:
    """Of the rollout whose id begins with `name`, None without one. Raises CliError for several."""
    if not (folder.path / "ledger.sqlite").exists():
        return None
    with closing(_open(folder)) as ledger:
        found = _read(ledger, f"{_ROW} WHERE rollouts.rollout_id LIKE ? || '%' LIMIT 2", [name])
    if len(found) > 1:
        raise CliError(f"more than one rollout of {folder.path} begins with {name!r}; give more of its id")
    return (found[0]["trace_id"] or _trace_of(folder, found[0]["rollout_id"])) if found else None


def _open(folder: RunFolder) -> sqlite3.Connection:
    try:
        ledger = folder.ledger()
    except sqlite3.DatabaseError as error:
        raise CliError(f"{folder.path / 'ledger.sqlite'} cannot be opened: {error}; run this as its owner") from error
    if ledger is None:
        raise CliError(folder.lacks("ledger.sqlite"))
    return ledger


def _read(ledger: sqlite3.Connection, query: str, values: Sequence[object] = ()) -> list[JsonObject]:
    try:
        return [dict(row) for row in ledger.execute(query, values)]
    except sqlite3.DatabaseError as error:
        raise CliError(f"the ledger cannot be read: {error}; is it a ledger of this version of meshrl?") from error


@click.group()
def rollouts() -> None:
    """Look up rollouts, and read those that are kept of each step."""


@rollouts.command()
@folder_option
@click.option("-n", "--number", type=click.IntRange(min=1), default=20, show_default=True, help="How many.")
@click.option("--env", "environment", help="Only of this environment.")
@click.option("--state", type=click.Choice(list(_IN_LEDGER)), help="Only in this state.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@json_option
def tail(
    folder: RunFolder, number: int, environment: str | None, state: str | None, follow: bool, as_json: bool
) -> None:
    """List the rollouts whose state changed last, the newest at the end."""
    wanted = {"rollouts.environment = ?": environment, "rollouts.state = ?": state and _IN_LEDGER[state]}
    given = {clause: value for clause, value in wanted.items() if value}
    where, values = " AND ".join(given) or "1", list(given.values())
    with closing(_open(folder)) as ledger:
        found = _read(ledger, f"{_ROW} WHERE {where} ORDER BY updated_s DESC LIMIT ?", [*values, number])[::-1]
        if environment and not found:
            known = [row["environment"] for row in _read(ledger, "SELECT DISTINCT environment FROM rollouts")]
            if known and environment not in known:
                raise CliError(f"no rollouts of {environment!r} in {folder.path}; there are some of {', '.join(known)}")
        _show(found, as_json=as_json)
        with suppress(KeyboardInterrupt):
            while follow:
                since = found[-1]["updated_s"] if found else 0.0
                time.sleep(FOLLOW_S)
                news = _read(ledger, f"{_ROW} WHERE {where} AND updated_s > ? ORDER BY updated_s", [*values, since])
                if news:
                    _show(news, as_json=as_json)
                    found = news


def _show(found: Sequence[JsonObject], *, as_json: bool) -> None:
    if as_json:
        for row in found:
            click.echo(json.dumps(row))
        return
    now_s = time.time()
    rows = [
        (row["rollout_id"] or "-", row["environment"], row["task_index"], row["state"], row["step"],
         row["oldest_version"],
         ago(now_s - row["updated_s"]), row["reason"])
        for row in found
    ]  # fmt: skip
    print_table(("rollout", "environment", "task", "state", "step", "version", "ago", "reason"), rows)


@rollouts.command()
@folder_option
@click.argument("rollout_id")
@json_option
def show(folder: RunFolder, rollout_id: str, as_json: bool) -> None:
    """Show the story of one rollout: its group, the step it trained, its advantage, its trace.

    The beginning of its id, or of its trace's, is enough.
    """
    with closing(_open(folder)) as ledger:
        where = "rollouts.rollout_id LIKE ? || '%' OR trace_id LIKE ? || '%'"
        found = _read(ledger, f"{_ROW} WHERE {where} LIMIT 3", [rollout_id, rollout_id])
        if len(found) != 1:
            what = "no rollout" if not found else "more than one rollout"
            raise CliError(f"{what} of {folder.path} begins with {rollout_id!r}; `meshrl rollouts tail` lists them")
        (row,) = found
        group = _read(ledger, "SELECT * FROM groups WHERE group_id = ?", [row["group_id"]])
        others = _read(ledger, "SELECT state FROM rollouts WHERE group_id = ?", [row["group_id"]])
        records = _read(ledger, "SELECT record FROM steps WHERE run = ? AND step = ?", [row["run"], row["step"]])
    story = dict(row)
    story["group"] = {**group[0], "states": [other["state"] for other in others]} if group else None
    story["advantage"] = json.loads(records[0]["record"])["advantages"].get(row["rollout_id"]) if records else None
    story["trace_id"] = row["trace_id"] or _trace_of(folder, row["rollout_id"])
    kept = next((line for line in folder.samples(row["step"] or 0) if line["rollout_id"] == row["rollout_id"]), None)
    if as_json:
        print_json({**story, "kept": kept})
        return
    group_of = story.pop("group") or {}
    for name, value in story.items():
        click.echo(f"{name:16} {'-' if value is None or value == '' else value}")
    for name in ("size", "for_step", "min_version", "active_version", "seed", "seconds"):
        click.echo(f"group.{name:10} {group_of.get(name, '-')}")
    click.echo(f"group.states     {', '.join(group_of.get('states', ()))}")
    if kept is not None:
        _print_rollout(kept)


def _trace_of(folder: RunFolder, rollout_id: str) -> str | None:
    for span in folder.spans():
        if span.name == "rl.rollout":
            ids = (span.attributes.get("meshrl.rollout_ids") or {}).get("values", ())
            if rollout_id in (each.get("stringValue") for each in ids):
                return span.trace_id
    return None


def _of_a_step(command: Callable[..., object]) -> Callable[..., object]:
    command = click.option("--env", "environment", help="Only of this environment.")(json_option(command))
    return folder_option(click.argument("step", type=int, required=False)(command))


@rollouts.command()
@_of_a_step
def samples(folder: RunFolder, step: int | None, environment: str | None, as_json: bool) -> None:
    """List the rollouts of a step, by default the last one, that are kept to be read."""
    kept = _kept(folder, step, environment)
    if as_json:
        print_json(kept)
        return
    rows = [
        (line["rollout_id"], line["environment"], line["picked"], _number(line.get("reward")),
         _number(line.get("advantage")), line.get("num_turns"), _beginning(line))
        for line in kept
    ]  # fmt: skip
    print_table(("rollout", "environment", "picked", "reward", "advantage", "turns", "it says"), rows)


@rollouts.command()
@_of_a_step
def worst(folder: RunFolder, step: int | None, environment: str | None, as_json: bool) -> None:
    """Show the rollout of a step, by default the last one, that has the lowest reward."""
    _show_extreme(_kept(folder, step, environment), min, as_json=as_json)


@rollouts.command()
@_of_a_step
def best(folder: RunFolder, step: int | None, environment: str | None, as_json: bool) -> None:
    """Show the rollout of a step, by default the last one, that has the highest reward."""
    _show_extreme(_kept(folder, step, environment), max, as_json=as_json)


def _kept(folder: RunFolder, step: int | None, environment: str | None) -> list[JsonObject]:
    steps = folder.sampled_steps()
    if not steps:
        raise CliError(f"{folder.lacks('rollouts/')}; a run keeps rollouts unless orchestrator.rollout_samples is None")
    if step is not None and step not in steps:
        raise CliError(
            f"no rollouts of step {step} are kept; there are those of {len(steps)} from {steps[0]} to {steps[-1]}"
        )
    found = folder.samples(steps[-1] if step is None else step)
    kept = [line for line in found if environment in (None, line["environment"])]
    if not kept:
        there = ", ".join(sorted({line["environment"] for line in found}))
        raise CliError(f"no rollouts of {environment!r} are kept of that step; there are some of {there}")
    return kept


def _show_extreme(kept: Sequence[JsonObject], extreme: Callable[..., JsonObject], *, as_json: bool) -> None:
    scored = [line for line in kept if line.get("reward") is not None]
    if not scored:
        raise CliError(f"none of the {len(kept)} kept rollouts has a reward; `meshrl rollouts samples` says why")
    chosen = extreme(scored, key=lambda line: line["reward"])
    if as_json:
        print_json(chosen)
    else:
        _print_rollout(chosen)


def _print_rollout(line: JsonObject) -> None:
    if "samples" not in line:
        click.echo(f"failed: {line['reason']}: {line['message']}")
        return
    parts = ", ".join(f"{name} {_number(value)}" for name, value in line["reward_parts"].items())
    agent = f", agent {line['agent']}" if line["agent"] else ""
    click.echo(
        f"{line['environment']} task {line['task_key'][:16]}{agent}: reward {_number(line['reward'])} ({parts}),"
        f" advantage {_number(line['advantage'])}, {line['num_turns']} turn(s), ended by {line['finish_reason']}"
    )
    click.echo(f"rollout {line['rollout_id']}, trace {line['trace_id']}")
    for number, sample in enumerate(line["samples"]):
        versions = sorted({version for _, _, version in sample["versions"]})
        sampled = [logprob for logprob in sample["logprobs"] if logprob is not None]
        mean = f"mean logprob {sum(sampled) / len(sampled):.3f}" if sampled else "nothing sampled"
        pairs = zip(sample["logprobs"], sample.get("trainer_logprobs", ()), strict=False)
        if gaps := [trained - logprob for logprob, trained in pairs if trained is not None]:
            mean += f", the trainer's is {sum(gaps) / len(gaps):+.3f} from it (at most {max(map(abs, gaps)):.3f})"
        click.echo(f"\nsample {number}: {len(sample['token_ids'])} tokens, {len(sampled)} sampled by version "
                   f"{', '.join(map(str, versions))}, {mean}")  # fmt: skip
        for message in sample["messages"]:
            click.secho(f"\n[{message['role']}]", bold=True)
            click.echo(message["text"])


def _beginning(line: JsonObject) -> str:
    if "samples" not in line:
        return f"{line['reason']}: {line['message']}"[:60]
    return first_words(line, 60)


def first_words(line: JsonObject, most: int) -> str:
    """The policy's first reply, in one line of at most `most` characters."""
    said = (
        message["text"]
        for sample in line.get("samples", ())
        for message in sample["messages"]
        if message["role"] == "assistant"
    )
    return " ".join(next(said, "").split())[:most]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
