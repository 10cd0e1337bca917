"""Dashboards and alert rules ask only for metrics that the programs offer."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.exposition import RecordMetrics, WatchMetrics
from meshrl.core.telemetry.waits import Waits
from meshrl.core.telemetry.watchdog import ProgramWatch
from meshrl.inference.engine import EngineStats
from meshrl.inference.http.metrics import EngineMetrics

FOLDER = Path(__file__).parents[3] / "deploy" / "observability"
RULES_TESTS = FOLDER / "prometheus" / "rules_tests"


def offered() -> set[str]:
    """The names that a scrape of a run may give, but for what prometheus_client says of a process."""
    stats = EngineStats(
        running=0, waiting=0, slots=1, generated_tokens=0, prefilled_tokens=0, shared_prompt_tokens=0,
        finished_requests=0, steps=0, busy_s=0.0,
    )  # fmt: skip
    engine: Any = SimpleNamespace(stats=lambda: stats, version=1, runs={})
    registry = CollectorRegistry()
    for collector in (RecordMetrics(), WatchMetrics(ProgramWatch("trainer", Waits(), None)), EngineMetrics(engine)):
        registry.register(collector)
    return {family.name for family in registry.collect()} | {metric.exported for metric in CATALOGUE.metrics}


def test_every_query_of_the_dashboard_and_the_rules_names_metrics_that_are_there() -> None:
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "run.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((FOLDER / "prometheus" / "rules.yaml").read_text())["groups"]
    queries += [rule["expr"] for group in rules for rule in group["rules"]]
    asked = {name for query in queries for name in re.findall(r"\bmeshrl_\w+", query)}
    assert len(asked) > 20
    assert asked - offered() == set()


def test_the_files_of_the_stack_name_each_other() -> None:
    stack = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert stack["services"].keys() == {"collector", "tempo", "prometheus", "grafana"}
    mounted = [volume for service in stack["services"].values() for volume in service["volumes"]]
    assert [name for name in mounted if name.startswith("./") and not (FOLDER / name.split(":")[0]).exists()] == []
    collector = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    tempo = yaml.safe_load((FOLDER / "tempo.yaml").read_text())
    takes = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert collector["exporters"]["otlp/tempo"]["endpoint"] == takes


def test_each_alert_rule_has_a_file_of_cases_in_which_it_fires_and_does_not() -> None:
    rules = yaml.safe_load((FOLDER / "prometheus" / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    files = {path.stem: yaml.safe_load(path.read_text())["tests"] for path in RULES_TESTS.glob("*.yaml")}
    assert files.keys() == alerts
    for alert, cases in files.items():
        checks = [check for case in cases for check in case["alert_rule_test"]]
        assert {check["alertname"] for check in checks} == {alert}
        assert {bool(check.get("exp_alerts")) for check in checks} == {True, False}


def test_the_cases_of_the_alert_rules_hold_under_promtool() -> None:
    promtool = shutil.which("promtool") or os.environ.get("PROMTOOL")
    if promtool is None:
        pytest.skip("no promtool here: apt-get install prometheus, or name one in PROMTOOL")
    command = [promtool, "test", "rules", *map(str, sorted(RULES_TESTS.glob("*.yaml")))]
    tested = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
