"""`meshrl rollouts`: what became of each rollout, from the run's ledger."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import click

from meshrl.cli.command import CliError, ago, folder_option, json_option, print_json, print_table
from meshrl.cli.run_folder import RunFolder

FOLLOW_S = 1.0

_ROW = """SELECT rollouts.rollout_id, rollouts.environment, rollouts.task_index, rollouts.state, rollouts.reason,
  rollouts.step, rollouts.oldest_version, rollouts.group_id, rollouts.updated_s, rollouts.key, rollouts.run
  FROM rollouts"""


def _open(folder: RunFolder) -> sqlite3.Connection:
    ledger = folder.ledger()
    if ledger is None:
        raise CliError(f"{folder.path} has no ledger.sqlite: name a run's output folder with -o")
    return ledger


def _read(ledger: sqlite3.Connection, query: str, values: Sequence[object]) -> list[Mapping[str, Any]]:
    try:
        return [dict(row) for row in ledger.execute(query, values)]
    except sqlite3.DatabaseError as error:
        raise CliError(f"the ledger cannot be read: {error}; is it a ledger of this version of meshrl?") from error


@click.group()
def rollouts() -> None:
    """Look up rollouts in the run's ledger."""


@rollouts.command()
@folder_option
@click.option("-n", "--number", type=click.IntRange(min=1), default=20, show_default=True, help="How many.")
@click.option("--env", "environment", help="Only of this environment.")
@click.option("--state", help="Only in this state: in_flight, ready, batched, trained, dropped, failed, cancelled.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@json_option
def tail(
    folder: RunFolder, number: int, environment: str | None, state: str | None, follow: bool, as_json: bool
) -> None:
    """List the rollouts whose state changed last, the newest at the end."""
    where, values = _filter(environment, state)
    with closing(_open(folder)) as ledger:
        found = _read(ledger, f"{_ROW} WHERE {where} ORDER BY updated_s DESC LIMIT ?", [*values, number])[::-1]
        _show(found, as_json=as_json)
        while follow:
            since = found[-1]["updated_s"] if found else 0.0
            time.sleep(FOLLOW_S)
            news = _read(ledger, f"{_ROW} WHERE {where} AND updated_s > ? ORDER BY updated_s", [*values, since])
            _show(news, as_json=as_json)
            found = news or found


def _filter(environment: str | None, state: str | None) -> tuple[str, list[object]]:
    wanted = {"rollouts.environment = ?": environment, "rollouts.state = ?": state}
    given = {clause: value for clause, value in wanted.items() if value}
    return " AND ".join(given) or "1", list(given.values())


def _show(found: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in found:
            click.echo(json.dumps(row))
        return
    if not found:
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
    """Tell the story of one rollout: its group, the step it trained, its advantage, its trace.

    The beginning of its id is enough.
    """
    with closing(_open(folder)) as ledger:
        found = _read(ledger, f"{_ROW} WHERE rollouts.rollout_id LIKE ? || '%' LIMIT 3", [rollout_id])
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
    story["trace_id"] = _trace_of(folder, row["group_id"], row["rollout_id"])
    if as_json:
        print_json(story)
        return
    group_of = story.pop("group") or {}
    for name, value in story.items():
        click.echo(f"{name:16} {'-' if value is None or value == '' else value}")
    for name in ("size", "for_step", "min_version", "active_version", "seed", "seconds"):
        click.echo(f"group.{name:10} {group_of.get(name, '-')}")
    click.echo(f"group.states     {', '.join(group_of.get('states', ()))}")


def _trace_of(folder: RunFolder, group_id: str, rollout_id: str) -> str | None:
    """The trace of the rollout, where its span names it, else None."""
    for _, span in folder.spans():
        if span["name"] == "rl.rollout":
            values = {pair["key"]: pair["value"].get("stringValue") for pair in span.get("attributes", ())}
            if values.get("meshrl.rollout_id") == rollout_id and values.get("meshrl.group_id") == group_id:
                return str(span["traceId"])
    return None
