"""Has Prometheus scrape a run, and asks it every query of the Grafana dashboard and every alert rule.

    apt-get download prometheus && dpkg -x prometheus_*.deb /tmp/prometheus
    python tests/benchmarks/bench_dashboards.py --prometheus /tmp/prometheus/usr/bin outputs/mine

The run must be going on, with `--log.metrics-port 0`. Prints how many series each query gives.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
WAIT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", type=Path, required=True, help="folder of prometheus and promtool")
    parser.add_argument("run", type=Path)
    given = parser.parse_args()
    check = [given.prometheus / "promtool", "check", "rules", FOLDER / "prometheus" / "rules.yaml"]
    subprocess.run(check, check=True, timeout=60.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = (FOLDER / "prometheus" / "prometheus.yaml").read_text()
        (folder / "prometheus.yaml").write_text(config.replace("/run_folder", str(given.run.resolve())))
        (folder / "rules.yaml").write_text((FOLDER / "prometheus" / "rules.yaml").read_text())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [given.prometheus / "prometheus", f"--config.file={folder}/prometheus.yaml"]
        command += [f"--web.listen-address={address}", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        try:
            return table(f"http://{address}")
        finally:
            server.terminate()
            server.wait(30.0)


def table(url: str) -> int:
    """Asks until every query has an answer, for a while; prints what there is and returns how many have none."""
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "run.json").read_text())
    queries = {target["expr"]: panel["title"] for panel in dashboard["panels"] for target in panel["targets"]}
    found: dict[str, int] = {}
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and len([query for query in queries if found.get(query)]) < len(queries):
        time.sleep(2.0)
        with suppress(OSError):
            found = {query: series(url, query) for query in queries}
    print("| panel | query | series |\n|---|---|---|")
    for query, title in queries.items():
        print(f"| {title} | `{query}` | {found.get(query, 0)} |")
    up = series(url, "up == 1")
    with urllib.request.urlopen(f"{url}/api/v1/rules", timeout=10.0) as answer:
        rules = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
    healthy = sum(rule["health"] == "ok" for rule in rules)
    print(f"\n{up} processes scraped; {healthy} of {len(rules)} alert rules are evaluated without an error")
    return sum(not found.get(query) for query in queries) + len(rules) - healthy


def series(url: str, query: str) -> int:
    asked = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(asked, timeout=10.0) as answer:
        return len(json.load(answer)["data"]["result"])


if __name__ == "__main__":
    sys.exit(main())
