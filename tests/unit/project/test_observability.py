"""Dashboards and alert rules ask only for metrics that the programs offer."""

import json
import re
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry

from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.exposition import RecordMetrics, WatchMetrics
from meshrl.core.telemetry.waits import Waits
from meshrl.core.telemetry.watchdog import ProgramWatch
from meshrl.inference.engine import EngineStats
from meshrl.inference.http.metrics import EngineMetrics

FOLDER = Path(__file__).parents[3] / "deploy" / "observability"


def offered() -> set[str]:
    """The names that a scrape of a run may give, but for what prometheus_client says of a process."""
    stats = EngineStats(
        running=0, waiting=0, slots=1, generated_tokens=0, prefilled_tokens=0, shared_prompt_tokens=0,
        finished_requests=0, steps=0, busy_s=0.0,
    )  # fmt: skip
    registry = CollectorRegistry()
    for collector in (RecordMetrics(), WatchMetrics(ProgramWatch("trainer", Waits(), None)), EngineMetrics(stats, 1)):
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
