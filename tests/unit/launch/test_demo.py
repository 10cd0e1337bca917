"""The demo's command line, its folder and its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.core.config import load_config
from meshrl.launch.config import RLConfig
from meshrl.launch.demo import TASKS, DemoError, Stage, empty, is_shown, looks, parse, run, stages
from meshrl.launch.demo_report import (
    ReportError,
    curves,
    draw,
    read_records,
    runs_table,
    summarise,
    table,
    write_summary,
)
from meshrl.sft.config import SFTConfig

CONFIGS = Path(__file__).parents[3] / "configs" / "reverse_text"


def step(number: int, reward: float, **extra: float) -> dict[str, Any]:
    return {
        "step": number,
        "reward/all/mean": reward,
        "batch/rollouts": 8.0,
        "batch/tokens": 400.0,
        "time/step": 2.0,
        "time/forward_backward": 0.75,
        "time/optimizer": 0.25,
        "perf/inference_tokens_per_s": 100.0,
        "weights/pause_s": 0.001 * number,
        "weights/lag_s": 0.01,
        "off_policy/all/max": float(number % 3),
    } | extra


def evaluation(version: int, score: float) -> dict[str, Any]:
    return {"step": version, "eval/version": float(version), "eval/held_out/avg@1": score, "eval/held_out/pass@1": 0.0}


RECORDS = [evaluation(0, 0.5), *(step(number, 0.1 * number) for number in range(1, 9)), evaluation(8, 0.875)]


def summarised(records: list[dict[str, Any]] = RECORDS) -> Any:
    return summarise(
        records,
        seconds_by_stage={"prepare": 1.0, "rl": 20.0},
        engine="vllm",
        max_async_level=2,
        seed=3,
        versions={"torch": "2"},
    )


def test_summary_compares_first_and_last_evaluation_and_steps() -> None:
    summary = summarised()
    assert (summary.reward_before, summary.reward_after, summary.reward_gain) == (0.5, 0.875, 0.375)
    assert summary.train_reward_first == pytest.approx(0.3)
    assert summary.train_reward_last == pytest.approx(0.6)
    assert summary.steps == 8
    assert summary.seconds == 21.0
    assert summary.staleness_max == 2


def test_rates_are_totals_over_time() -> None:
    summary = summarised()
    assert summary.rollouts_per_s == pytest.approx(4.0)
    assert summary.tokens_per_s.engine == pytest.approx(100.0)
    assert summary.tokens_per_s.trainer == pytest.approx(400.0)
    assert summary.sync_pause_s == pytest.approx(0.0045)
    assert summary.sync_pause_max_s == pytest.approx(0.008)


def test_skipped_versions_have_no_pause_and_do_not_spoil_the_mean() -> None:
    records = [evaluation(0, 0.5), step(1, 0.5), step(2, 0.5), evaluation(2, 0.5)]
    del records[1]["weights/pause_s"]
    assert summarised(records).sync_pause_s == pytest.approx(0.002)


def test_a_run_without_steps_or_evaluations_is_refused() -> None:
    with pytest.raises(ReportError, match="made no step"):
        summarised([evaluation(0, 0.5)])
    with pytest.raises(ReportError, match="1 evaluations, but before and after are needed"):
        summarised([evaluation(0, 0.5), step(1, 0.5)])


def test_curve_has_a_point_a_step_and_one_an_evaluated_version() -> None:
    points = curves(RECORDS)
    assert [number for number, _ in points.train] == list(range(1, 9))
    assert points.held_out == [(0, 0.5), (8, 0.875)]


def test_report_is_written_as_json_and_picture(tmp_path: Path) -> None:
    write_summary({"": summarised()}, tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert {"reward_before", "reward_after", "steps", "seconds", "rollouts_per_s", "tokens_per_s"} <= set(written)
    assert {"sync_pause_s", "sync_lag_s", "versions"} <= set(written)
    assert written["tokens_per_s"] == {"engine": pytest.approx(100.0), "trainer": pytest.approx(400.0)}
    draw({"reverse_text": curves(RECORDS)}, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_table_names_the_gain_and_the_units() -> None:
    text = table(summarised())
    assert "0.875  (+0.375)" in text
    assert "tokens a second, vllm engine (sampled)" in text
    assert "4.5 ms  (at most 8.0 ms)" in text


def test_metrics_of_a_run_that_never_began_are_reported_missing(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="the run ended before its first step"):
        read_records(tmp_path / "metrics.jsonl")


def test_options_reach_the_programs(tmp_path: Path) -> None:
    options = parse(["--seed", "7", "--max-async-level", "0", "--max-steps", "3", "--output-dir", str(tmp_path)])
    prepare, sft, rl = stages(options)
    assert all("7" in command for stage in (prepare, sft, rl) for command in stage.commands)
    command = " ".join(rl.commands[0])
    assert "--max-async-level 0" in command
    assert "--max-steps 3" in command
    assert (sft.shown_steps, rl.shown_steps) == (50, 5)


def test_three_runs_have_one_model_and_data_of_their_own(tmp_path: Path) -> None:
    options = parse(["--runs", "--output-dir", str(tmp_path), "--warm-up-steps", "4"])
    prepare, sft, rl = stages(options)
    made = [command[2] for command in prepare.commands]
    assert made[0] == "meshrl.environments.reverse_text.model"
    assert made[1:] == [f"meshrl.environments.{task}.demonstrations" for task in TASKS]
    warmed = load_config(SFTConfig, sft.commands[0][1:], prog="sft", environ={})
    assert (warmed.max_steps, warmed.data.subsets) == (4, list(TASKS))
    config = load_config(RLConfig, rl.commands[0][1:], prog="rl", environ={})
    assert [run.run_id for run in config.runs] == list(TASKS)
    assert not config.feeds_own_run


def test_the_table_of_several_runs_has_a_line_each() -> None:
    lines = runs_table({"a": summarised(), "b": summarised()}).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["run", "a", "b"]
    assert "0.500 -> 0.875" in lines[1]
    assert "0.300 -> 0.600" in lines[1]


def test_vllm_is_started_from_the_environment_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse(["--engine", "vllm"])
    with pytest.raises(DemoError, match="run make vllm, or make demo ENGINE=vllm"):
        stages(options)
    python = tmp_path / ".tools" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    prepare, _, rl = stages(options)
    assert prepare.commands[0][-2:] == ("--head-dim", "32")
    command = " ".join(rl.commands[0])
    assert "rl.toml @ configs/reverse_text/vllm.toml --inference.python .tools/vllm/bin/python" in command
    assert "vllm" not in " ".join(stages(parse([]))[-1].commands[0])


@pytest.mark.parametrize(
    "flags", [["--max-async-level", "-1"], ["--max-steps", "0"], ["--runs", "--engine", "vllm"], ["--nonsense"]]
)
def test_wrong_options_end_with_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert "demo: error:" in capsys.readouterr().err


def test_only_a_demos_own_files_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "rl" / "logs").mkdir(parents=True)
    (tmp_path / "summary.json").write_text("{}")
    empty(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(DemoError, match=r"holds thesis\.txt, which no demo made"):
        empty(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_failing_or_hanging_command_is_told_and_ended() -> None:
    shown: list[str] = []
    program = "print('hello', flush=True); raise SystemExit(3)"
    failing = Stage(name="sft", title="", commands=((sys.executable, "-c", program),), deadline_s=30.0)
    with pytest.raises(DemoError, match="sft failed with exit code 3"):
        run(failing, shown.append)
    assert shown == ["hello\n"]
    hanging = Stage(name="rl", title="", commands=(("sleep", "60"),), deadline_s=0.1)
    with pytest.raises(DemoError, match=r"rl did not end within 0\.1 s"):
        run(hanging, shown.append)


def test_of_many_steps_a_few_are_shown_and_of_everything_else_all() -> None:
    lines = [f"12:00:00.000 INFO    sft step {number} | loss 1.0\n" for number in range(1, 11)]
    assert [line for line in lines if is_shown(line, 5)] == [lines[0], lines[4], lines[9]]
    assert is_shown("12:00:00.000 INFO    orchestrator step 3 | eval/reverse_text/avg@1 0.5\n", 5)
    assert is_shown("Traceback (most recent call last):\n", 5)


def test_the_demos_configurations_are_valid_and_agree() -> None:
    sft = load_config(SFTConfig, ["@", str(CONFIGS / "sft.toml")], prog="sft")
    rl = load_config(RLConfig, ["@", str(CONFIGS / "rl.toml")], prog="rl")
    vllm = load_config(RLConfig, ["@", str(CONFIGS / "rl.toml"), "@", str(CONFIGS / "vllm.toml")], prog="rl")
    assert vllm.inference is not None
    assert vllm.inference.engine == "vllm"
    assert vllm.inference.model.dtype == vllm.trainer.model.dtype == "bfloat16"
    assert rl.trainer.model.name == f"{sft.output_dir}/weights/final"
    assert rl.orchestrator.eval is not None
    assert vllm.orchestrator.eval is not None
    for run_config in (rl.orchestrator.eval, vllm.orchestrator.eval):
        assert [env.args for env in run_config.env] == [{"split": "held_out"}]
    assert rl.orchestrator.eval.sampling.temperature == rl.orchestrator.sampling.temperature == 1.0


def test_the_demo_says_how_to_look_into_its_run(tmp_path: Path) -> None:
    mine = tmp_path / "my demo" / "rl"
    worst, browser = looks(mine, mine, last_step=60).splitlines()
    assert worst.endswith(f"meshrl rollouts worst 30 -o '{tmp_path}/my demo/rl'")
    assert Path(browser.split()[4]).name == "meshrl"
    assert looks(tmp_path, tmp_path, last_step=7).splitlines()[0].endswith(f"worst 7 -o {tmp_path}")
