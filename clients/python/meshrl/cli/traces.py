"""`meshrl trace`: the spans of one step, the slowest of each kind, or all for Perfetto."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

import click

from meshrl.cli.command import CliError, ago, folder_option, json_option, print_json, print_table
from meshrl.cli.rollouts import find_trace
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.trace_file import RunSpan
from meshrl.wire.values import JsonObject

STEP_SPAN = "rl.step"
_ID = 8
"""Numbers of as many digits begin an id."""


def read_spans(folder: RunFolder) -> list[RunSpan]:
    """By start. Raises CliError without any."""
    found = sorted(folder.spans(), key=lambda span: span.start_s)
    if not found:
        raise CliError(folder.lacks("traces"))
    return found


@click.group()
def trace() -> None:
    """Look at the traces of a run."""


@trace.command()
@folder_option
@click.argument("what", metavar="STEP|ROLLOUT|TRACE")
@json_option
def show(folder: RunFolder, what: str, as_json: bool) -> None:
    """Show what happened in one step, rollout or trace, as a tree in the order of time.

    The beginning of the id of a rollout or trace is enough.
    """
    spans = read_spans(folder)
    trace_id = _trace_of_step(folder, spans, int(what)) if what.isdecimal() and len(what) < _ID else None
    if trace_id is None:
        trace_id = find_trace(folder, what) or next((s.trace_id for s in spans if s.trace_id.startswith(what)), None)
    found = [span for span in spans if span.trace_id == trace_id]
    if not found:
        raise CliError(
            f"{folder.path}/traces have no span of {what!r}, which is no step and no id of a rollout or a trace there;"
            " `meshrl rollouts tail` lists rollouts, and the oldest spans go (log.traces_max_mib)"
        )
    if as_json:
        print_json([asdict(span) for span in found])
        return
    below: dict[str, list[RunSpan]] = defaultdict(list)
    known = {span.span_id for span in found}
    for span in found:
        below[span.parent_id if span.parent_id in known else ""].append(span)
    _print_tree(below[""], below, since_s=found[0].start_s, depth=0)


def _trace_of_step(folder: RunFolder, spans: Sequence[RunSpan], step: int) -> str:
    steps = {int(span.attributes["rl.step"]): span for span in spans if span.name == STEP_SPAN}
    if step not in steps:
        if not steps and folder.runs:
            raise CliError(folder.lacks("steps in its traces"))
        there = f"steps {min(steps)} to {max(steps)}" if steps else "no steps yet"
        raise CliError(f"no span of step {step} in {folder.path}/traces: there are {there}")
    return steps[step].trace_id


def _print_tree(
    spans: Sequence[RunSpan], below: Mapping[str, Sequence[RunSpan]], *, since_s: float, depth: int
) -> None:
    for span in spans:
        name = "  " * depth + span.name
        links = f"  -> {len(span.links)} linked" if span.links else ""
        click.echo(f"{span.start_s - since_s:9.3f}s {span.seconds:9.3f}s  {span.program:13} {name}{links}")
        _print_tree(below.get(span.span_id, ()), below, since_s=since_s, depth=depth + 1)


@trace.command()
@folder_option
@click.option("-n", "--number", type=click.IntRange(min=1), default=15, show_default=True, help="How many kinds.")
@json_option
def slowest(folder: RunFolder, number: int, as_json: bool) -> None:
    """List the kinds of spans that took longest, with the step or group of the longest of each."""
    kinds: dict[tuple[str, str], list[RunSpan]] = defaultdict(list)
    for span in read_spans(folder):
        kinds[span.program, span.name].append(span)
    rows = sorted((_longest(*kind, spans) for kind, spans in kinds.items()), key=lambda row: row.max_s, reverse=True)
    if as_json:
        print_json([asdict(row) for row in rows[:number]])
        return
    print_table(
        ("program", "span", "count", "median", "longest", "of", "trace"),
        [
            (row.program, row.name, row.count, ago(row.median_s), ago(row.max_s), _of(row.longest), row.trace_id)
            for row in rows[:number]
        ],
    )


@dataclass(frozen=True, kw_only=True)
class SpanKind:
    program: str
    name: str
    count: int
    median_s: float
    max_s: float
    longest: JsonObject
    trace_id: str


def _longest(program: str, name: str, spans: Sequence[RunSpan]) -> SpanKind:
    longest = max(spans, key=lambda span: span.seconds)
    return SpanKind(
        program=program,
        name=name,
        count=len(spans),
        median_s=statistics.median(span.seconds for span in spans),
        max_s=longest.seconds,
        longest=longest.attributes,
        trace_id=longest.trace_id,
    )


def _of(attributes: JsonObject) -> str:
    named = ("rl.step", "meshrl.version", "meshrl.group_id", "rl.version")
    return next((f"{key.rpartition('.')[2]} {attributes[key]}" for key in named if key in attributes), "")


@trace.command()
@folder_option
@click.option("--perfetto", "target", type=click.Path(dir_okay=False, path_type=Path), required=True,
              help="The file to write; opens in ui.perfetto.dev and chrome://tracing.")  # fmt: skip
def export(folder: RunFolder, target: Path) -> None:
    """Write all spans as a timeline: a lane for each program, arrows for the links."""
    spans = read_spans(folder)
    try:
        target.write_text(json.dumps({"traceEvents": list(_events(spans))}), encoding="utf-8")
    except OSError as error:
        raise CliError(f"{target} cannot be written: {error.strerror}; name another file with --perfetto") from error
    click.echo(f"{len(spans)} spans of {len({span.program for span in spans})} programs are in {target}")


def _events(spans: Sequence[RunSpan]) -> Iterable[JsonObject]:
    """Spans of one program that overlap without nesting get tracks of their own.

    Perfetto needs whole microseconds (it drops slices that overlap by a rounding), thread ids that no other thread or
    process has, and numbered arrows from the earlier begin to the later.
    """
    programs = {program: number for number, program in enumerate(sorted({span.program for span in spans}), 1)}
    begin_us = min(span.start_us for span in spans)
    for program, pid in programs.items():
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": program}}
    tracks: dict[str, list[list[tuple[int, int]]]] = defaultdict(list)
    threads: dict[tuple[int, int], int] = {}
    placed: dict[str, tuple[int, int, int]] = {}
    for span in sorted(spans, key=lambda span: (span.start_us, -span.end_us)):  # of two that begin together the outer
        pid = programs[span.program]
        track = (pid, _track(tracks[span.program], span))
        tid = threads.setdefault(track, len(programs) + 1 + len(threads))
        start_us = span.start_us - begin_us
        placed[span.span_id] = (pid, tid, start_us)
        ids = {"trace_id": span.trace_id, "span_id": span.span_id}
        yield {"name": span.name, "ph": "X", "pid": pid, "tid": tid, "ts": start_us, "dur": span.end_us - span.start_us,
               "cat": span.program, "args": {**span.attributes, **ids}}  # fmt: skip
    arrows = itertools.count(1)
    for span in spans:
        for linked in span.links:
            if linked in placed:
                flow = next(arrows)
                ends = sorted((placed[linked], placed[span.span_id]), key=itemgetter(2))
                for phase, (pid, tid, at_us) in zip("sf", ends, strict=True):
                    yield {"name": "link", "cat": "link", "ph": phase, "bp": "e", "id": flow, "pid": pid, "tid": tid,
                           "ts": at_us}  # fmt: skip


def _track(tracks: list[list[tuple[int, int]]], span: RunSpan) -> int:
    for number, opened in enumerate(tracks):
        while opened and opened[-1][1] <= span.start_us:
            opened.pop()
        if not opened or (span.end_us <= opened[-1][1] and span.start_us > opened[-1][0]):
            opened.append((span.start_us, span.end_us))
            return number
    tracks.append([(span.start_us, span.end_us)])
    return len(tracks) - 1
