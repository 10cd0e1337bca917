import asyncio
import json
import math
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web
from wandb.proto import wandb_internal_pb2

from http_servers import serving_http
from meshrl.core.config import ConfigError
from meshrl.core.config.shared import LogConfig, WandbConfig
from meshrl.core.paths import Layout
from meshrl.core.telemetry.monitor import ConsoleSink, JsonlSink, Monitor, SampleRow, Sink
from meshrl.core.telemetry.sinks import WandbSink, WebhookSink, open_monitor
from meshrl.diagnosis.causes import Ailment
from polling import until
from small_disk import fill, mounted
from tensorboard_values import tensorboard_values

SAMPLE = SampleRow(environment="echo", task_key="t", prompt="say abc", completion="abc", reward=1.0, advantage=0.5)

FLAT = Ailment(
    cause="zero_learning_rate", symptom="flat reward", evidence="optim/lr is 0", key="trainer.optim.lr", remedy="raise"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", mebibytes=1) as folder:
        yield folder


def test_each_record_is_one_json_line_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    monitor = Monitor([JsonlSink(path)])
    monitor.log(1, {"reward/all/mean": 0.5, "loss/mean": float("nan")})
    monitor.log(2, {"reward/all/mean": 1})
    monitor.close()
    monitor.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "reward/all/mean": 0.5, "loss/mean": None},
        {"step": 2, "reward/all/mean": 1.0},
    ]


def test_the_console_shows_the_main_numbers_of_a_step_and_the_scores_of_an_evaluation(said: list[str]) -> None:
    sink = ConsoleSink()
    sink.write(3, {"reward/all/mean": 0.5, "optim/grad_norm": 0.25, "batch/groups": 4, "time/step": 1.234})
    sink.write(3, {"eval/echo/avg@2": 0.75, "eval/echo/failed": 0.0})
    sink.write(4, {"batch/groups": 4})
    assert said == ["step 3 | reward 0.5000 | grad_norm 0.250 | step_s 1.23", "step 3 | eval/echo/avg@2 0.7500"]


class FailingRun:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: object) -> None:
        self.calls += 1
        raise OSError("no network")


def test_a_wandb_run_that_fails_is_switched_off_and_the_run_goes_on() -> None:
    run = FailingRun()
    sink = WandbSink.__new__(WandbSink)
    sink._run, sink._wandb = run, __import__("wandb")
    sink.write(1, {"a": 1.0})
    sink.write(2, {"a": 1.0})
    sink.close()
    assert run.calls == 1


def test_wandb_offline_takes_metrics_tables_and_histograms(tmp_path: Path) -> None:
    sink = WandbSink(WandbConfig(name="n", offline=True), tmp_path, {"seed": 1})
    for step in (1, 2, 30):
        sink.write(step, {"a": 1.0})
        sink.write_samples(step, [SAMPLE])
        sink.write_distributions(step, {"distributions/reward": [0.0, 1.0]})
    sink.write_alerts(2, [FLAT])
    assert sink._run is not None, "an alert failed"
    sink.close()
    (run,) = tmp_path.glob("wandb/offline-run-*")
    tables = [json.loads(path.read_text()) for path in run.glob("files/media/table/samples_*.table.json")]
    rows = sorted(row for table in tables for row in table["data"])
    assert [(row[0], row[3], row[4]) for row in rows] == [(step, "say abc", "abc") for step in (1, 2, 30)]
    (recorded,) = run.glob("*.wandb")
    along_steps = wandb_internal_pb2.MetricRecord(glob_name="*", step_metric="step").SerializeToString()
    asyncio.run(until(lambda: along_steps in recorded.read_bytes()))  # W&B's own process may write after `close`


def test_wandb_mode_of_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(WandbConfig(name="n"), tmp_path, {})
    sink.write(1, {"a": 1.0})
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_wandb_without_a_key_is_warned_about_once_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "nobody"))
    sink = WandbSink(WandbConfig(name="n"), tmp_path, {})
    monitor = Monitor([sink, JsonlSink(tmp_path / "metrics.jsonl")])
    monitor.log(1, {"a": 1.0})
    monitor.log(2, {"a": 1.0})
    monitor.close()
    (said,) = warned
    assert said.startswith("no metrics go to W&B: ")
    assert "run `wandb login` or set WANDB_API_KEY, or set wandb.offline" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


class FailingSink(Sink):
    """Fails in a way that nobody foresaw, until it is mended."""

    def __init__(self) -> None:
        self.failing, self.steps = True, []

    def write(self, step: int, metrics: object) -> None:
        if self.failing:
            raise RuntimeError("the service is gone")
        self.steps.append(step)

    def close(self) -> None:
        raise RuntimeError("the service is gone")


def test_a_destination_that_fails_is_warned_about_once_and_the_others_go_on(tmp_path: Path, warned: list[str]) -> None:
    sink = FailingSink()
    monitor = Monitor([sink, JsonlSink(tmp_path / "metrics.jsonl")])
    for step in (1, 2, 3):
        sink.failing = step < 3
        monitor.log(step, {"a": 1.0})
    assert (sink.steps, warned) == ([3], ["the service is gone; the run goes on"])
    monitor.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


async def test_a_webhook_gets_each_alert_and_one_that_refuses_it_is_warned_about(
    tmp_path: Path, warned: list[str]
) -> None:
    posted: list[dict[str, object]] = []

    async def take(request: web.Request) -> web.Response:
        posted.append(await request.json())
        return web.Response(status=200 if len(posted) == 1 else 404)

    app = web.Application()
    app.router.add_post("/hook", take)
    async with serving_http(app) as address:
        monitor = Monitor([WebhookSink(f"{address}/hook", tmp_path)])
        await asyncio.to_thread(monitor.log_alerts, 7, [FLAT])
        assert warned == []
        await asyncio.to_thread(monitor.log_alerts, 8, [FLAT])
    assert posted[0]["text"] == f"{tmp_path}, step 7: zero_learning_rate: optim/lr is 0; trainer.optim.lr: raise"
    assert {"step": 7, "run": str(tmp_path), "key": "trainer.optim.lr"}.items() <= posted[0].items()
    (said,) = warned
    assert said.startswith("the webhook does not take the alert zero_learning_rate: HTTP Error 404")


def test_records_that_a_full_disk_refuses_follow_once_there_is_room(small_disk: Path, warned: list[str]) -> None:
    monitor = Monitor([JsonlSink(small_disk / "metrics.jsonl")])
    monitor.log(1, {"a": 1.0})
    filler = fill(small_disk)
    for step in range(2, 300):  # the last page of the file still takes some
        monitor.log(step, {"a": 1.0, "b": float("nan")})
    (said,) = warned
    assert "metrics.jsonl cannot be written (No space left on device), 1 records wait; free some space" in said
    whole = [json.loads(line)["step"] for line in (small_disk / "metrics.jsonl").read_text().splitlines()]
    assert whole == list(range(1, len(whole) + 1))
    assert 0 < len(whole) < 299
    filler.unlink()
    monitor.log(300, {"a": 1.0})
    monitor.close()
    steps = [json.loads(line)["step"] for line in (small_disk / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 301))


def test_tensorboard_takes_metrics_samples_and_distributions(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    monitor = open_monitor(layout, LogConfig(tensorboard=True), None, {})
    monitor.log(3, {"reward/all/mean": 0.5, "loss/mean": math.nan})
    monitor.log_samples(3, [SAMPLE])
    monitor.log_distributions(3, {"reward": [0.0, 1.0, 1.0], "empty": []})
    monitor.close()
    found = tensorboard_values(tmp_path / "tensorboard")
    assert found["reward/all/mean"].simple_value == 0.5
    assert math.isnan(found["loss/mean"].simple_value)
    assert found["reward"].histo.num == 3
    assert SAMPLE.completion in found["samples/0/text_summary"].tensor.string_val[0].decode()
    assert "empty" not in found


def test_trackio_takes_metrics_samples_and_distributions_and_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for step in (3, 4):
        monitor = open_monitor(Layout(tmp_path / "mine"), LogConfig(trackio=True), None, {"seed": 7})
        monitor.log(step, {"reward/all/mean": step / 10, "loss/mean": math.nan})
        monitor.log_samples(step, [SAMPLE])
        monitor.log_distributions(step, {"reward": [0.0, 1.0, 1.0], "empty": []})
        monitor.close()
    with closing(sqlite3.connect(tmp_path / "trackio" / "meshrl.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {(name, step) for name, step, _ in rows} == {("mine", 3), ("mine", 4)}
    found = [json.loads(metrics) for _, _, metrics in rows]
    assert [each["reward/all/mean"] for each in found if "reward/all/mean" in each] == [0.3, 0.4]
    (first, _) = [each["samples"]["_value"] for each in found if "samples" in each]
    assert first[0]["completion"] == SAMPLE.completion
    assert "Trackio" not in capfd.readouterr().out


def test_trackio_that_does_not_start_costs_a_warning_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:1/")
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN", raising=False)
    monitor = open_monitor(Layout(tmp_path), LogConfig(trackio=True), None, {})
    monitor.log(1, {"a": 1.0})
    monitor.close()
    (said,) = warned
    assert said.startswith("no metrics go to Trackio: Self-hosted logging requires a write token")
    assert said.endswith("; mend that, or leave out log.trackio")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 1.0}


@pytest.mark.parametrize(("package", "key"), [("tensorboardX", "tensorboard"), ("trackio", "trackio")])
def test_a_service_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, key: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'meshrl\[{key}\]'"):
        open_monitor(Layout(tmp_path), LogConfig(**{key: True}), None, {})
