"""The report of a run: one file that needs no network, with what the run came to and cost."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from made_run import make_run
from meshrl.cli.main import main
from meshrl.cli.run_folder import RunFolder
from meshrl.diagnosis.outcome import RunOutcome


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "run", steps=10)
    with (path / "metrics.jsonl").open("a") as file:
        more = {"progress/samples": 400.0, "perf/throughput": 80.0, "perf/throughput_per_gpu": 40.0}
        file.write(json.dumps({"step": 10, **more, "weights/engines": 3.0}) + "\n")
    return path


def test_the_cost_is_of_all_devices_for_the_time_of_the_steps(run_path: Path) -> None:
    (run_path / "configs/inference.toml").write_text("tensor_parallel_size = 2\n")
    outcome = RunFolder(run_path).outcome(price=3.6)
    assert outcome == RunOutcome(steps=10, rollouts=400, seconds=10.0, devices=2 + 3 * 2, price=3.6)
    assert outcome.device_hours == pytest.approx(80 / 3600)
    assert outcome.line() == (
        "10 steps and 400 rollouts in 10 s on 8 devices: 0.0222 device-hours at a cost of 0.08, 0.0556 device-hours at"
        " a cost of 0.2 per 1,000 rollouts, 0.00222 device-hours at a cost of 0.008 per step"
    )


def test_a_step_that_was_done_again_is_one_step_and_costs_its_time_twice(run_path: Path) -> None:
    with (run_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, "time/step": 1.0, "progress/redone": 1.0}) + "\n")
    outcome = RunFolder(run_path).outcome()
    assert outcome is not None
    assert (outcome.steps, outcome.seconds) == (10, 11.0)
    with (run_path / "metrics.jsonl").open("a") as file:  # resumed from step 6, with max_steps 7
        file.write(json.dumps({"step": 7, "time/step": 1.0}) + "\n")
    undone = RunFolder(run_path).outcome()
    assert undone is not None
    assert (undone.steps, undone.seconds) == (7, 12.0)


def test_a_price_of_the_configuration_is_taken_and_shared_devices_count_once(run_path: Path) -> None:
    (run_path / "configs/orchestrator.toml").write_text("[log]\ndevice_hour_price = 2.0\n")
    (run_path / "configs/inference.toml").write_text('tensor_parallel_size = "None"\nshare_gpu = true\n')
    outcome = RunFolder(run_path).outcome()
    assert outcome is not None
    assert (outcome.devices, outcome.price) == (3, 2.0)
    assert RunFolder(run_path / "none").outcome() is None


@pytest.mark.parametrize("named", [[], ["-o"]])
def test_the_report_is_one_file_without_an_address_of_another(run_path: Path, tmp_path: Path, named: list[str]) -> None:
    run = [*named, str(run_path)]
    done = CliRunner().invoke(main, ["report", *run, "--to", str(tmp_path / "it.html"), "--price", "2"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "it.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)""", page), "nothing is fetched"
    assert not re.findall(r"^(?:import|export) ", page, re.MULTILINE), "each module is in it"
    assert "at a cost of" in page
    assert "the slower half was the engines: the trainer waited for batches for 60% of the time" in page
    assert "<h2>The best of step 10: reward 1</h2>" in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page, "what a policy wrote stays text"
    (data,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', page)
    assert json.loads(data)["series"]["reward/all/mean"][1][-1] == 1.0


def test_a_folder_that_is_named_twice_is_refused(run_path: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(run_path), "-o", str(tmp_path)])
    assert (done.exit_code, done.output.count("give one of them")) == (2, 1)


def test_a_folder_without_a_step_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "has no step in metrics.jsonl" in done.output
