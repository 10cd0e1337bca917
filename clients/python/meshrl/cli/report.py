"""`meshrl report`: a run in one HTML file that needs no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from meshrl.cli.command import CliError, folder_option
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.ui.views import Traces, waits_of
from meshrl.diagnosis.causes import Observed, diagnose
from meshrl.diagnosis.history import MetricsHistory
from meshrl.diagnosis.outcome import slower_half
from meshrl.wire.values import JsonObject

STATIC = Path(__file__).parent / "ui/static"
SCRIPTS = ("page.js", "chart.js", "overview.js", "timeline.js", "weights.js")
"""Modules of `meshrl ui` that draw the page, each after its imports."""
MOST_POINTS, MOST_SPANS = 1000, 1000
SHOWN_KEYS = re.compile(r"\.(model\.name|optim\.\w+|loss\.\w+|max_steps|batch_size|group_size|max_async_level|seed)$")
_DRAW = """
const run = JSON.parse(document.querySelector("#run").textContent);
const charts = document.querySelector(".charts");
for (const [title, unit, of] of curves(run.names, run.series)) charts.append(chart(title, unit, of));
const show = (place, title, ...parts) => document.querySelector(place).append(element("h2", {}, title), ...parts);
if (run.timeline) show("#timeline", `Step ${run.timeline.step}`, ...lanes(run.timeline));
if (run.versions.versions.length) show("#versions", "Versions", versions(run.versions, []));
"""


def report_page(folder: RunFolder, price: float | None) -> str:
    """Raises CliError if no step has ended."""
    history = folder.history()
    outcome = folder.outcome(history, price)
    if outcome is None:
        raise CliError(folder.lacks("step in metrics.jsonl", how=""))
    observed = folder.observed(history)
    traces = Traces(folder)
    traces.read_on()
    step = max(traces.steps, default=0)
    timeline = traces.timeline(step, MOST_SPANS)
    data = {
        "names": history.names,
        "series": history.points(history.names, MOST_POINTS),
        "timeline": timeline and {**timeline, "waits": waits_of(history.series.columns, step)},
        "versions": traces.versions(),
    }
    end = folder.end()
    parts = [
        f"<h1>{_text(folder.path.resolve())}</h1>",
        *(f'<p class="sentence">{_text(line)}</p>' for line in (outcome.line(), slower_half(observed)) if line),
        "" if end is None else f"<h2>{_text(end.why)} at {_text(end.at)}</h2><pre class='log'>{_text(end.log)}</pre>",
        "<h2>What it came to</h2>",
        _table(("metric", "first", "last", "best"), _scores(history)),
        *_causes(observed),
        '<h2>Curves</h2><div class="charts"></div><div id="timeline"></div><div id="versions"></div>',
        *_rollouts(folder),
        "<h2>Configuration</h2>",
        _table(("key", "value"), [row for row in folder.settings().items() if SHOWN_KEYS.search(row[0])]),
        f'<script type="application/json" id="run">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>',
        f"<script>{_read('uPlot.iife.min.js')}</script>",
        f'<script type="module">{_scripts()}{_DRAW}</script>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(folder.path.name)} - meshrl</title><style>{_read('uPlot.min.css')}{_read('style.css')}</style>"
        f"</head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _scores(history: MetricsHistory) -> Iterator[Sequence[object]]:
    for name, column in sorted(history.series.columns.items()):
        if name == "reward/all/mean" or re.fullmatch(r"eval/.+/(avg|pass)@\d+", name):
            yield name, *(f"{value:.4g}" for value in (column.values[0], column.values[-1], max(column.values)))


def _causes(observed: Observed) -> Iterator[str]:
    found = diagnose(observed)
    if found:
        yield "<h2>What is wrong, the cause that explains most first</h2>"
        yield _table(("cause", "evidence", "what to do"), [(one.cause, one.evidence, one.what_to_do) for one in found])


def _rollouts(folder: RunFolder) -> Iterator[str]:
    steps = folder.sampled_steps()
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        scored = [line for line in folder.samples(step) if line.get("reward") is not None and line.get("samples")]
        for words, extreme in (("best", max), ("worst", min)):
            if scored:
                line: JsonObject = extreme(scored, key=lambda one: one["reward"])
                yield f"<h2>The {words} of step {step}: reward {line['reward']:.3g}</h2>"
                for message in line["samples"][-1]["messages"]:
                    yield f'<div class="message {_text(message["role"])}"><h3>{_text(message["role"])}</h3>'
                    yield f"<pre>{_text(message['text'])}</pre></div>"


def _scripts() -> str:
    text = "\n".join(map(_read, SCRIPTS))
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row) + "</tr>" for row in rows)
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table></div>'


def _text(value: object) -> str:
    return html.escape(str(value))


@click.command()
@click.argument("run", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@folder_option
@click.option(
    "--to", "target", type=click.Path(dir_okay=False, path_type=Path), help="The file; report.html in the folder."
)
@click.option("--price", type=click.FloatRange(min=0.0), help="Of one GPU for an hour, in your currency.")
def report(run: Path | None, folder: RunFolder, target: Path | None, price: float | None) -> None:
    """Write a run in one HTML file: curves, the last step's timeline, versions, cost, causes and rollouts.

    RUN is its output folder, as -o. The file needs no network, so it can be attached to an issue.
    """
    if run is not None:
        if click.get_current_context().get_parameter_source("folder") is ParameterSource.COMMANDLINE:
            raise click.UsageError("RUN and -o both name a run's folder; give one of them")
        folder = RunFolder(run)
    path = target or folder.path / "report.html"
    page = report_page(folder, price)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}; name another file with --to") from error
    click.echo(f"{path}: open it in a browser")
