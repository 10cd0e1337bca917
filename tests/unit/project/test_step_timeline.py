"""How the timeline of a step finds gaps and names them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from step_timeline import gaps_of, outside, read_spans, steps_of, timeline


def write(folder: Path, service: str, *spans: tuple[str, float, float], step: int = 1) -> None:
    """Spans by name, start and end in milliseconds, one request a line as the exporter writes them."""
    lines = []
    for name, start_ms, end_ms in spans:
        span = {"name": name, "startTimeUnixNano": str(int(start_ms * 1e6)), "endTimeUnixNano": str(int(end_ms * 1e6))}
        if name == "rl.step":
            span["attributes"] = [{"key": "rl.step", "value": {"intValue": str(step)}}]
        lines.append(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    folder.joinpath("traces").mkdir(exist_ok=True)
    folder.joinpath("traces", f"{service}.jsonl").write_text("\n".join([*lines, '{"resourceSpans": [{"cut off']))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Engines sample for 400 ms, the trainer trains for 300 after a wait of 40, and publishes."""
    write(tmp_path, "orchestrator", ("rl.step", 0, 1000))
    write(tmp_path, "rollout", ("chat a", 0, 250), ("chat b", 200, 400), ("rl.rollout", 0, 420))
    write(
        tmp_path,
        "trainer",
        ("rl.train.forward_backward", 440, 700),
        ("rl.train.optimizer", 700, 740),
        ("rl.train.publish", 800, 900),
    )
    return tmp_path


def test_every_gap_is_named_by_what_went_on_meanwhile(run: Path) -> None:
    spans = read_spans(run)
    assert list(steps_of(spans)) == [1]
    first, second, third = gaps_of(spans, (0.0, 1.0), longer_s=0.05)
    assert (first.lane, first.start_s, first.end_s) == ("trainer", 0.0, pytest.approx(0.44))
    assert {name: round(1000 * length) for name, length in first.meanwhile.items()} == {
        "rollouts are in flight": 420,
        "engines sample": 400,
        "untraced": 20,
    }
    assert (second.lane, round(1000 * (second.end_s - second.start_s))) == ("engines", 600)
    assert next(iter(second.meanwhile)) == "the trainer computes gradients"
    assert {name: round(1000 * length) for name, length in third.meanwhile.items()} == {
        "untraced": 160,
        "a version is published": 100,
    }


def test_short_gaps_are_left_out_and_shares_are_of_the_step(run: Path) -> None:
    text = timeline(read_spans(run), 1, longer_s=0.5)
    assert [line.split()[2] for line in text.splitlines()[1:3]] == ["30.0%", "40.0%"]
    assert text.count("GAP") == 1
    assert "engines  GAP of 600 ms" in text


def test_what_is_left_of_a_window() -> None:
    assert outside([(1.0, 2.0), (1.5, 3.0), (5.0, 9.0)], (0.0, 6.0)) == [(0.0, 1.0), (3.0, 5.0)]
    assert outside([], (0.0, 1.0)) == [(0.0, 1.0)]
    assert outside([(0.0, 1.0)], (0.0, 1.0)) == []
