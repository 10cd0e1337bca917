"""Runs a training whose spans go to MLflow over OTLP, and holds what MLflow has kept against the run's ledger.

    python -m venv /tmp/mlflow && /tmp/mlflow/bin/pip install mlflow
    python tests/benchmarks/bench_tracing.py --mlflow /tmp/mlflow/bin/python --model outputs/demo/sft/weights/final

    python tests/benchmarks/bench_tracing.py --cost outputs/mine

Every rollout that the ledger calls trained must be linked from the `rl.train` of its step, and link to the `rl.sync` of
each version that it was sampled from. MLflow is asked through its own client, in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, SpanContext
from trace_audit import Span, TraceReport, hold_against, trained

from meshrl.core.telemetry.otlp_file import JsonLinesSpanExporter
from meshrl.core.telemetry.tracing import MAX_LINKS, MAX_QUEUE, build_provider
from meshrl.wire.trace_file import read_lines, spans_of, trace_files

ROOT = Path(__file__).parents[2]
START_S, READ_S, RUN_S = 300.0, 600.0, 1800.0
READ = """
import json, sys
from mlflow import MlflowClient
client, token = MlflowClient(sys.argv[1]), None
while True:
    page = client.search_traces(locations=["0"], max_results=100, page_token=token)
    for trace in page:
        for span in trace.data.spans:
            links = [(link.trace_id.removeprefix("tr-"), link.span_id) for link in span.links]
            attributes = {key: value for key, value in span.attributes.items() if not key.startswith("mlflow.")}
            row = [trace.info.trace_id.removeprefix("tr-"), span.span_id, span.parent_id or "", span.name, attributes]
            print(json.dumps([*row, links]))
    token = page.token
    if not token:
        break
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mlflow", type=Path, help="an interpreter that has mlflow")
    parser.add_argument("--model", help="the model that the run begins with")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output-dir", type=Path, help="where the run is kept, instead of a temporary folder")
    parser.add_argument("--cost", type=Path, help="a run: measures what writing spans like its own takes of a step")
    given = parser.parse_args()
    if given.cost is not None:
        cost(given.cost)
        return 0
    if given.mlflow is None or given.model is None:
        parser.error("--mlflow and --model, or --cost")
    with tempfile.TemporaryDirectory() as folder:
        run = given.output_dir or Path(folder) / "run"
        server, url = start_mlflow(given.mlflow, Path(folder))
        try:
            train(given.model, given.steps, url, run)
            spans = read(given.mlflow, url)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60.0)
        report = hold_against(spans, trained(run / "ledger.sqlite"))
        table(report, run)
    return 1 if report.problems else 0


def cost(run: Path, rounds: int = 7) -> None:
    """Makes, ends and writes spans as many and as large as those of the run, and holds the time against its steps.

    By our tracer and by OpenTelemetry's own in turns. The CPU time is that of all threads of this process, so that the
    writing beside the loop is in it.
    """
    spans = [span for path in trace_files(run / "traces") for span in spans_of(read_lines(path)[0])]
    again = [
        (
            span["name"],
            {pair["key"]: _value(pair["value"]) for pair in span.get("attributes", ())},
            [Link(_context(link)) for link in span.get("links", ())],
        )
        for span in spans
    ]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step_s = statistics.median(step["time/step"] for step in steps if "time/step" in step)
    count = sum("time/step" in step for step in steps)
    rollouts = sum(span["name"] == "rl.rollout" for span in spans)
    taken_s: dict[str, list[float]] = {"ours": [], "OpenTelemetry's": []}
    for _ in range(rounds):
        for whose, taken in taken_s.items():
            with tempfile.TemporaryDirectory() as folder:
                exporter = JsonLinesSpanExporter(Path(folder) / "bench.jsonl.zst")
                provider = build_provider("bench", [exporter]) if whose == "ours" else _sdk_provider(exporter)
                tracer = provider.get_tracer("meshrl")
                began_s = time.process_time()
                for name, attributes, links in again:
                    span = tracer.start_span(name, context=Context(), links=links)
                    span.set_attributes(attributes)
                    span.end()
                provider.shutdown()
                taken.append(time.process_time() - began_s)
    print(f"{len(spans)} spans of {count} steps and {rollouts} rollouts; a step takes {step_s:.2f} s")
    for whose, taken in taken_s.items():
        per_step_s, each_us = statistics.median(taken) / count, 1e6 * statistics.median(taken) / rollouts
        share = 100 * per_step_s / step_s
        print(f"{whose} tracer: {1e3 * per_step_s:.2f} ms of CPU a step, {each_us:.0f} us a rollout, {share:.2f}%")


def _sdk_provider(exporter: SpanExporter) -> TracerProvider:
    provider = TracerProvider(span_limits=SpanLimits(max_links=MAX_LINKS), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000, max_queue_size=MAX_QUEUE))
    return provider


def _value(written: Mapping[str, Any]) -> Any:
    """What an attribute was before OTLP wrote it in JSON."""
    ((kind, value),) = written.items()
    match kind:
        case "intValue":
            return int(value)
        case "arrayValue":
            return [_value(each) for each in value["values"]]
    return value


def _context(link: Mapping[str, str]) -> SpanContext:
    return SpanContext(int(link["traceId"], 16), int(link["spanId"], 16), is_remote=True)


def start_mlflow(python: Path, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [python, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--default-artifact-root", folder / "artifacts", "--port", str(port), "--workers", "1"]
    with (folder / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(
            [str(part) for part in command], stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5.0):
            return server, url
        time.sleep(0.5)
    os.killpg(server.pid, signal.SIGTERM)
    raise SystemExit(f"MLflow did not come up:\n{(folder / 'mlflow.log').read_text()}")


def train(model: str, steps: int, url: str, output_dir: Path) -> None:
    export = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-mlflow-experiment-id=0",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "120",
        "OTEL_BSP_MAX_QUEUE_SIZE": "20000",
    }
    command = [sys.executable, "-m", "meshrl.launch.main", "@", "configs/reverse_text/rl.toml", "--model.name", model]
    command += ["--output-dir", str(output_dir), "--max-steps", str(steps), "--no-orchestrator.eval"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **export}, timeout=RUN_S, check=True)


def read(python: Path, url: str) -> list[Span]:
    found = subprocess.run(
        [str(python), "-c", READ, url], capture_output=True, text=True, timeout=READ_S, check=True
    ).stdout
    rows = [json.loads(line) for line in found.splitlines() if line.startswith("[")]
    return [Span(*row[:5], links=tuple((trace, span) for trace, span in row[5])) for row in rows]


def table(report: TraceReport, run: Path) -> None:
    size = sum(path.stat().st_size for path in (run / "traces").iterdir())
    print("| | |\n|---|---|")
    print(f"| spans that MLflow has | {sum(report.spans.values())} |")
    print(f"| rollouts that the ledger calls trained | {report.ledger_rollouts} |")
    print(f"| links from `rl.train` to rollouts | {report.train_links} |")
    print(f"| of those that link to the commit of each of their versions | {report.synced_rollouts} |")
    print(f"| lost parents, links or rollouts | {len(report.problems)} |")
    print(f"| bytes in traces/ for each rollout | {size / max(1, report.spans['rl.rollout']):.0f} |")
    for problem in report.problems[:10]:
        print(problem)


if __name__ == "__main__":
    sys.exit(main())
