"""`meshrl watch`: curves, rates, waits and programs of a run in a terminal, redrawn in place."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import click

from meshrl.cli.command import folder_option, run
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.status import RunStatus, read_status
from meshrl.diagnosis.causes import diagnose
from meshrl.diagnosis.history import MetricsHistory

CURVES = (
    ("reward", "reward/all/mean"),
    ("held-out score", "eval/"),
    ("loss", "loss/mean"),
    ("gradient norm", "optim/grad_norm"),
    ("entropy", "entropy/all/mean"),
    ("mismatch KL", "mismatch_kl/all/mean"),
    ("tokens a reply", "completion_len/all/mean"),
    ("lag, versions", "off_policy/all/mean"),
    ("rollouts/s", "perf/rollouts_per_s"),
    ("tokens/s sampled", "perf/inference_tokens_per_s"),
    ("tokens/s trained", "perf/throughput"),
    ("seconds a step", "time/step"),
    ("  for rollouts", "time/wait_for_rollouts"),
    ("  for the trainer", "time/wait_for_ckpt"),
)
"""Labels and metrics; `eval/` is the first mean score of an evaluation."""
LEAST_WIDTH = 40
BLOCKS, LETTERS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


def sparkline(values: Sequence[float], ramp: str) -> str:
    low, high = min(values), max(values)
    top = len(ramp) - 2
    return "".join(ramp[1 + (round((value - low) / (high - low) * top) if high > low else 0)] for value in values)


def screen(
    status: RunStatus, history: MetricsHistory, causes: Sequence[str], *, width: int, letters: bool
) -> Iterator[str]:
    """One look, no line longer than `width`: sentences are wrapped, rows of services cut off."""
    room = max(LEAST_WIDTH, width)
    now = f"now: {status.waiting}" if status.waiting else ""
    ended = f"it ended by: {status.ended_by}" if status.ended_by else ""
    for sentence in (status.headline, now, ended):
        yield from textwrap.wrap(sentence, room)
    yield from ("", *_curves(history, room - 30, LETTERS if letters else BLOCKS), "")
    for line in _services(status):
        yield line if len(line) <= room else f"{line[: room - 3]}..."
    for cause in causes:
        yield from textwrap.wrap(f"! {cause}", room, subsequent_indent="  ")


def _curves(history: MetricsHistory, points: int, ramp: str) -> Iterator[str]:
    score = next((name for name in history.names if name.startswith("eval/") and "/avg@" in name), "")
    for label, name in CURVES:
        shown = score if name == "eval/" else name
        _, values, _ = history.points([shown], points).get(shown, ([], [], []))
        if values:
            yield f"{label:17} {history.series.columns[shown].values[-1]:>10.4g}  {sparkline(values, ramp)}"


def _services(status: RunStatus) -> Iterator[str]:
    for row in status.rows:
        version = "" if row.version is None else f" v{row.version}" + (f" (-{row.lag})" if row.lag else "")
        yield f"{row.service:12} {row.address} {row.state}{version}: {row.detail}"


@click.command()
@folder_option
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.2), default=2.0, help="Seconds between two looks."
)
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks; without it at Ctrl-C.")
def watch(folder: RunFolder, interval_s: float, count: int | None) -> None:
    """Show curves, rates, waits, programs and what is wrong, again and again, in place.

    80 columns are enough, without colour. On a terminal without block characters it draws with letters.
    """
    history = folder.history()
    looks = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            now = run(read_status(folder))
            causes = [f"{one.cause}: {one.evidence}; {one.what_to_do}" for one in diagnose(folder.observed(history))]
            width = shutil.get_terminal_size((80, 24)).columns
            click.clear()
            click.echo("\n".join(screen(now, history, causes, width=width, letters=not _has_blocks(sys.stdout))))
            looks += 1
            if looks == count:
                return
            time.sleep(interval_s)


def _has_blocks(terminal: TextIO) -> bool:
    try:
        BLOCKS.encode(terminal.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
