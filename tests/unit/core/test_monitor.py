import json
from pathlib import Path

from meshrl.core.monitor import ConsoleSink, JsonlSink, Monitor, SampleRow, WandbSink


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


def test_the_console_shows_the_main_numbers_of_a_step_and_the_scores_of_an_evaluation() -> None:
    lines: list[str] = []
    sink = ConsoleSink(lines.append)
    sink.write(3, {"reward/all/mean": 0.5, "optim/grad_norm": 0.25, "batch/groups": 4, "time/step": 1.234})
    sink.write(3, {"eval/echo/avg@2": 0.75, "eval/echo/failed": 0.0})
    sink.write(4, {"batch/groups": 4})
    assert lines == ["step 3 | reward 0.5000 | grad_norm 0.250 | step_s 1.23", "step 3 | eval/echo/avg@2 0.7500"]


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
    sink = WandbSink(project="p", name="n", offline=True, folder=tmp_path, settings={"seed": 1})
    row = SampleRow(environment="echo", task_key="t", completion="abc", reward=1.0, advantage=0.5)
    sink.write(1, {"a": 1.0})
    sink.write_samples(1, [row])
    sink.write_distributions(1, {"distributions/reward": [0.0, 1.0]})
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*"))
