"""Runs a training whose spans go to MLflow over OTLP, and holds what MLflow has kept against the run's ledger.

    python -m venv /tmp/mlflow && /tmp/mlflow/bin/pip install mlflow
    python tests/benchmarks/bench_tracing.py --mlflow /tmp/mlflow/bin/python --model outputs/demo/sft/weights/final

Every rollout that the ledger calls trained must be linked from the `rl.train` of its step, and link to the `rl.sync` of
each version that it was sampled from. MLflow is asked through its own client, in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from trace_audit import Span, TraceReport, hold_against, trained

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
    parser.add_argument("--mlflow", type=Path, required=True, help="an interpreter that has mlflow")
    parser.add_argument("--model", required=True, help="the model that the run begins with")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start_mlflow(given.mlflow, Path(folder))
        try:
            train(given.model, given.steps, url, Path(folder) / "run")
            spans = read(given.mlflow, url)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60.0)
        report = hold_against(spans, trained(Path(folder) / "run" / "ledger.sqlite"))
        table(report, Path(folder) / "run")
    return 1 if report.problems else 0


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
