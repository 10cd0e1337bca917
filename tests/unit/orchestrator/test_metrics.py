from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.algorithms.advantages import mean_baseline_advantages
from meshrl.core.metrics.statistics import distribution
from meshrl.orchestrator.bench.summary import AloneRates, BenchSummary, summarise, summary_table
from meshrl.orchestrator.reports.step_record import (
    activation_metrics,
    merged,
    mixture_metrics,
    rollout_metrics,
    trainer_metrics,
)
from meshrl.orchestrator.work.batches import assemble
from meshrl.wire.types import RolloutFailure, StepEvent, StepState
from rl_streams import rl_streams


def test_statistics_are_over_all_and_by_environment(make_rollout, make_group) -> None:
    echo = make_group("g0", (make_rollout("a", reward=0.0), make_rollout("b", reward=1.0, truncated=True)), size=2)
    math = make_group("g1", (make_rollout("c", reward=4.0, sampled=0),), size=2, environment="math")
    math.failures.append(
        RolloutFailure(rollout_id="d", group_id="g1", reason="ENGINE_FAILED", message="", retryable=True)
    )
    metrics = rollout_metrics([echo, math])
    assert metrics["reward/all/mean"] == pytest.approx(5 / 3)
    assert (metrics["reward/echo/mean"], metrics["reward/echo/std"]) == (0.5, 0.5)
    assert (metrics["reward/math/max"], metrics["reward/math/min"]) == (4.0, 4.0)
    assert (metrics["is_truncated/echo/mean"], metrics["is_truncated/all/mean"]) == (0.5, pytest.approx(1 / 3))
    assert (metrics["empty_rollouts/math"], metrics["empty_rollouts/echo"]) == (1.0, 0.0)
    assert (metrics["errored_rollouts/math"], metrics["errored_rollouts/all"]) == (0.5, 0.25)
    assert (metrics["seq_len/echo/mean"], metrics["completion_len/all/mean"]) == (5.0, 2.0)


def test_completions_of_several_tasks_are_counted(make_rollout, make_group) -> None:
    one, other = make_rollout("a"), replace(make_rollout("b"), task_key="t1")  # the same tokens
    own = make_rollout("c", sampled=4)
    metrics = rollout_metrics([make_group("g0", (one, own)), make_group("g1", (other, make_rollout("d", sampled=0)))])
    assert metrics["repeated_completions/all"] == 0.5
    siblings = rollout_metrics([make_group("g0", (one, make_rollout("e")))])
    assert siblings["repeated_completions/all"] == 0.0, "a right answer may be given twice"


def test_values_that_are_not_finite_do_not_spoil_a_mean() -> None:
    assert distribution("x", [1.0, float("nan"), 3.0], "mean max") == {"x/mean": 2.0, "x/max": 3.0}
    assert distribution("x", [], "mean") == {}


def test_trainer_times_keep_their_names_and_its_step_gets_its_own() -> None:
    event = StepEvent(
        revision=1,
        step=1,
        state=StepState.DONE,
        metrics={"loss/mean": 0.1, "time/step": 9.0},
        timings_s={"step": 2.0, "wait_for_batch": 0.5},
    )
    assert trainer_metrics(event) == {"loss/mean": 0.1, "time/train_step": 2.0, "time/wait_for_batch": 0.5}


def test_a_name_of_a_record_is_filled_by_one_source_only() -> None:
    own = {"progress/tokens": 40.0, "batch/tokens": 20.0}
    record = merged(own, trainer={"loss/mean": 0.5, "progress/tokens": 7.0})
    assert record == {**own, "loss/mean": 0.5, "trainer/progress/tokens": 7.0}
    again = merged(record, trainer={"progress/tokens": 8.0})
    assert again == {**record, "trainer/trainer/progress/tokens": 8.0}


def test_a_skipped_version_is_marked() -> None:
    assert activation_metrics(None) == {"weights/activated": 0.0}


def test_the_bench_table_leaves_out_the_first_step() -> None:
    table = summary_table([{"time/step": 100.0}, {"time/step": 1.0}, {"time/step": 3.0}])
    assert table.splitlines()[1].split() == ["seconds", "a", "step", "2.0000", "1.0000", "3.0000"]
    assert summary_table([{}]) == "1 steps are too few to measure: run at least 2"


def test_what_each_environment_makes_up_of_a_batch_stands_beside_what_was_asked_of_it(make_rollout, make_group) -> None:
    groups = []
    for name, count, sampled in (("a", 4, 3), ("b", 2, 6), ("late", 2, 3)):
        prompt = 60 if name == "late" else 2  # beyond the row: nothing of it is trained
        members = tuple(
            make_rollout(f"{name}{place}", reward=place, sampled=sampled, prompt=prompt, environment=name)
            for place in range(count)
        )
        groups.append(replace(make_group(name, members, environment=name), kept=members))
    assembled = assemble(
        [group.kept for group in groups],
        run_id="",
        step=1,
        streams=rl_streams([group.kept for group in groups], mean_baseline_advantages),
        environments=dict.fromkeys(("a", "b", "c", "late"), 32),
        seq_len=32,
        dp_size=1,
    )
    metrics = mixture_metrics(assembled, groups, {"a": 0.5, "b": 0.25, "c": 0.125, "late": 0.125})
    assert [metrics[f"mixture/{name}/rollouts"] for name in ("a", "b", "c", "late")] == [4 / 6, 2 / 6, 0.0, 0.0]
    assert [metrics[f"mixture/{name}/tokens"] for name in ("a", "b", "c", "late")] == [0.5, 0.5, 0.0, 0.0]
    assert [metrics[f"mixture/{name}/ratio"] for name in ("a", "b", "c", "late")] == [0.5, 0.25, 0.125, 0.125]


def bench_record(step_s: float, *, wait_for_batch_s: float) -> dict[str, float]:
    """A step that samples 1,000 tokens and trains 2,000 of them, at half of the device's peak while it trains."""
    busy_s = 5.0 - wait_for_batch_s
    return {
        "time/step": step_s,
        "time/wait_for_ckpt": 0.7,
        "perf/engines_idle": 0.5 / step_s,
        "time/train_step": 5.0,
        "time/wait_for_batch": wait_for_batch_s,
        "perf/inference_tokens_per_s": 1000.0 / step_s,
        "perf/throughput": 2000.0 / busy_s,
        "perf/mfu": 0.5,
        "perf/peak_memory": 3.0 + wait_for_batch_s,
    }


def test_the_bench_summary_weighs_steps_by_their_time_and_leaves_out_the_first() -> None:
    records = [bench_record(99.0, wait_for_batch_s=0.0), *(bench_record(s, wait_for_batch_s=1.0) for s in (4.0, 6.0))]
    summary = summarise(records, AloneRates(engines=250.0, trainer=600.0))
    assert summary == BenchSummary(
        steps=2,
        step_s=5.0,
        sampled_tokens_per_s=200.0,  # 2,000 in 10 s, not the mean of 250 and 167
        trained_tokens_per_s=400.0,
        trained_tokens_per_s_busy=500.0,
        mfu=0.4,
        mfu_busy=0.5,
        peak_memory_gib=4.0,
        trainer_idle=0.2,
        engines_idle=0.1,
        engines_alone_tokens_per_s=250.0,
        trainer_alone_tokens_per_s=600.0,
        trainer_alone_measured=True,
        efficiency=0.8,  # engines alone need 8 s for these steps, the trainer 6.7; they took 10
        by_turns=pytest.approx(8.0 / 10.0 + 4000.0 / 600.0 / 10.0),
    )
    shown = " ".join(summary.table().split())
    assert "80.0% of the slower side alone 146.7% of both by turns" in shown
    shared = summarise(
        [{**one, "batch/shared_prefix_ratio": 0.5} for one in records], AloneRates(engines=500.0, trainer=500.0)
    )
    assert shared is not None
    assert (shared.trained_tokens_per_s, shared.by_turns) == (400.0, pytest.approx(0.4 + 0.4))  # half of 4,000 in 4 s
    two = summarise([{**one, "weights/engines": 2.0} for one in records], AloneRates(engines=150.0, trainer=600.0))
    assert two is not None
    assert (two.engines_alone_tokens_per_s, two.efficiency) == (300.0, pytest.approx(2.0 / 3.0))


def test_the_bench_summary_says_what_it_does_not_know() -> None:
    summary = summarise([{}, bench_record(5.0, wait_for_batch_s=1.0)], AloneRates())
    assert summary is not None
    assert (summary.efficiency, summary.by_turns, summary.trainer_alone_tokens_per_s) == (None, None, 500.0)
    assert "run `inference --bench` with this output_dir first" in summary.table()
    bare = summarise([{}, {"time/step": 2.0}], AloneRates(engines=1.0, trainer=1.0))
    assert bare is not None
    assert (bare.sampled_tokens_per_s, bare.mfu, bare.trainer_idle, bare.efficiency) == (None, None, None, None)
    assert summarise([{"time/step": 2.0}], AloneRates()) is None


def test_rates_alone_are_read_where_programs_left_them(tmp_path: Path) -> None:
    assert AloneRates.read(tmp_path) == AloneRates()
    (tmp_path / "trainer.json").write_text('{"tokens_per_s": 12.5}')
    (tmp_path / "inference.json").write_text("broken")
    assert AloneRates.read(tmp_path) == AloneRates(trainer=12.5)
