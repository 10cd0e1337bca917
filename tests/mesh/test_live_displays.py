"""A live run as others see it: Prometheus with every query of the dashboard, and a browser with `meshrl ui`.

The tests share one run with those of `test_live_run`, which end it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from browser import CHROMIUM, browser_tab
from local_ports import free_port
from made_run import make_run
from mesh_run import Run
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.ui.server import Page

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]

STACK = Path(__file__).parents[2] / "deploy/observability"
PROMETHEUS = shutil.which("prometheus")
ANSWERS_S = 120.0
TEXT = "document.querySelector('#view').innerText"


@pytest.fixture
def prometheus(live_run: Run, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus with the stack's own configuration, which scrapes every second."""
    assert PROMETHEUS is not None
    shutil.copytree(STACK / "prometheus", tmp_path / "etc")
    config = tmp_path / "etc/prometheus.yaml"
    text = config.read_text().replace("/run_folder", str(live_run.output_dir)).replace(": 5s", ": 1s")
    config.write_text(text)
    address = f"127.0.0.1:{free_port()}"
    command = [PROMETHEUS, f"--config.file={config}", f"--web.listen-address={address}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--storage.tsdb.path={tmp_path / 'data'}"], stdout=log, stderr=log)
    yield f"http://{address}"
    process.terminate()
    process.wait(timeout=60)


def dashboard_queries() -> list[str]:
    dashboard = json.loads((STACK / "grafana/dashboards/run.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def asked(address: str) -> dict[str, object]:
    """What Prometheus answers; nothing while it is not up yet."""
    try:
        with urllib.request.urlopen(address, timeout=10.0) as answer:
            found: dict[str, object] = json.load(answer)["data"]
            return found
    except OSError:
        return {}


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here: apt-get install prometheus")
def test_every_query_of_the_dashboard_has_data_of_a_live_run(prometheus: str) -> None:
    unanswered = dashboard_queries()
    assert len(unanswered) > 20
    end = time.monotonic() + ANSWERS_S
    while unanswered and time.monotonic() < end:
        addresses = {
            query: f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}" for query in unanswered
        }
        unanswered = [query for query, address in addresses.items() if not asked(address).get("result")]
        time.sleep(0.5)
    assert not unanswered
    engines = asked(f"{prometheus}/api/v1/query?query=meshrl_engine_policy_version")["result"]
    assert isinstance(engines, list)
    assert {engine["metric"]["program"] for engine in engines} == {"inference", "inference_2"}
    groups = asked(f"{prometheus}/api/v1/rules")["groups"]
    assert isinstance(groups, list)
    assert {
        (rule["name"], rule["lastError"]) for group in groups for rule in group["rules"] if rule.get("lastError")
    } == set()


@pytest.mark.skipif(CHROMIUM is None, reason="a real browser: needs Chromium on PATH")
async def test_a_live_run_is_zoomed_hovered_filtered_and_compared_in_a_browser(live_run: Run, tmp_path: Path) -> None:
    recorded = make_run(tmp_path / "recorded", steps=10)
    app = Page([RunFolder(live_run.output_dir), RunFolder(recorded)]).application(hosts=None, token=None)
    server = TestServer(app)
    await server.start_server()
    address = str(server.make_url("/"))
    async with browser_tab() as tab:
        await tab.open(f"{address}#/0/overview")
        await tab.until(f"document.querySelectorAll('.u-wrap').length > 8 && {TEXT}.includes('running')")
        shown = len(live_run.steps())
        await tab.until("document.querySelector('.chart').plot.data[0].length > 8")  # from step 0 on
        await tab.drag(".u-over", 0.2, 0.8)
        await tab.until("document.querySelector('.chart').plot.scales.x.min > 1")
        await tab.until("document.querySelector('.u-legend').innerText.match(/reward.all.mean\\s*\\d/)")
        await tab.until(f"Math.max(...document.querySelector('.chart').plot.data[0]) > {shown}")
        await tab.open(f"{address}#/0/rollouts?least=2")
        await tab.until("document.querySelector('input[type=search]') && !document.querySelector('tbody tr')")
        await tab.open(f"{address}#/0/rollouts?most=2")
        await tab.until("document.querySelector('tbody tr') && document.querySelector('.message.assistant')")
        await tab.open(f"{address}#/0/weights")
        await tab.until("document.querySelectorAll('svg.rails rect').length > 3")
        await tab.until(f"{TEXT}.includes('serves now')")
        await tab.open(f"{address}#/0/hosts")
        await tab.until(f"{TEXT}.includes('Who plays rollouts') && {TEXT}.includes('inference_2')")
        await tab.open(f"{address}#/0/environments")
        await tab.until(f"{TEXT}.includes('reverse_text') && document.querySelector('.funnel .trained')")
        await tab.open(f"{address}#/0/runs")
        await tab.until(f"{TEXT}.includes(\"Runs at this run's trainer\") && {TEXT}.includes('main')")
        await tab.open(f"{address}#/0/timeline")
        await tab.until("document.querySelectorAll('rect.span').length > 10")
        await tab.open(f"{address}#/0/compare")
        await tab.until("document.querySelector('.chart')?.plot?.series.length == 3")
        assert tab.errors == []
    await server.close()
