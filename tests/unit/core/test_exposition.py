"""What Prometheus gets: every metric of a record under the catalogue's name, and the program's waits and loop."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from meshrl.core.config.shared import LogConfig
from meshrl.core.metrics.document import document
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.program import run
from meshrl.core.telemetry.exposition import RecordMetrics, observed
from meshrl.core.telemetry.waits import Waits

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_record_is_exported_with_its_placeholders_and_statistics_as_labels() -> None:
    registry, records = CollectorRegistry(), RecordMetrics()
    registry.register(records)
    records.write(3, {"reward/all/mean": 0.5, "reward/my env/mean": 0.25, "time/step": 2.0, "eval/words/avg@4": 0.75})
    records.write(4, {"reward/all/mean": 0.625, "dropped/stale": 2.0})
    assert samples(generate_latest(registry).decode()) == {
        ("meshrl_step", ()): 4.0,
        ("meshrl_reward", (("scope", "all"), ("statistic", "mean"))): 0.625,
        ("meshrl_reward", (("scope", "my env"), ("statistic", "mean"))): 0.25,
        ("meshrl_time_step", ()): 2.0,
        ("meshrl_eval_avg", (("environment", "words"), ("k", "4"))): 0.75,
        ("meshrl_dropped", (("reason", "stale"),)): 2.0,
    }


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("mixture/a/b/tokens", {"environment": "a/b"}),
        ("mismatch_kl/all/max", {"scope": "all", "statistic": "max"}),
        ("progress/tokens", {}),
    ],
)
def test_a_name_is_taken_apart_as_it_was_declared(name: str, labels: dict[str, str]) -> None:
    parts = CATALOGUE.parts(name)
    assert parts is not None
    assert parts[1] == labels
    assert CATALOGUE.parts("nobody/declared/this") is None


def test_the_page_of_metrics_is_that_of_the_catalogue() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == document(), "run `python -m meshrl.core.metrics.document > docs/metrics.md`"
    assert all(f"`{metric.name}`" in page for metric in CATALOGUE.metrics)
    for metric in CATALOGUE.metrics:  # the rule that the page gives for names at Prometheus
        plain = re.sub(r"[@/_]?\{\w+\}", "", metric.name)
        assert metric.exported == "meshrl_" + plain.replace("/", "_"), metric.name


def test_a_program_offers_its_waits_where_its_target_file_says(tmp_path: Path) -> None:
    target = tmp_path / "metrics_targets" / "trainer.json"
    target.parent.mkdir()
    target.write_text("[]")
    before = target.open()  # Prometheus is told of each change, and reads at once

    def scraped() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        (named,) = json.loads(target.read_text())
        assert named["labels"] == {"program": "trainer"}
        with urllib.request.urlopen(f"http://{named['targets'][0]}/metrics", timeout=DEADLINE_S) as answer:
            return samples(answer.read().decode())

    async def main(stop: asyncio.Event) -> int:
        waits, log = Waits(), LogConfig(metrics_port=0)
        with observed("trainer", waits, CollectorRegistry(), log, tmp_path), waits.waiting("batch", "batch 1"):
            async with asyncio.timeout(DEADLINE_S):
                found = await asyncio.to_thread(scraped)
                while ("meshrl_waiting_seconds", (("wait", "batch"),)) not in found:
                    await asyncio.sleep(0.1)
                    found = await asyncio.to_thread(scraped)
            assert found["meshrl_waiting_overdue", (("wait", "batch"),)] == 0.0
            assert found["meshrl_loop_lag_seconds", ()] >= 0.0
            assert found["process_resident_memory_bytes", ()] > 2**20
        return 0

    assert run(main) == 0
    with before:
        assert before.read() == "[]", "nobody reads a file that is half written"
    assert not target.exists(), "nobody is to scrape a program that has ended"
