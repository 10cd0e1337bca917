"""The rollouts that a run keeps of each step, as the commands show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner, Result

from meshrl.cli.main import main


def meshrl(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    def line(rollout_id: str, reward: float, said: str) -> dict[str, Any]:
        sample = {
            "token_ids": [1, 2], "logprobs": [None, -0.5], "temperature": 1.0, "versions": [[1, 2, 7]],
            "messages": [{"role": "user", "text": "why?", "tokens": [0, 1]},
                         {"role": "assistant", "text": said, "tokens": [1, 2]}],
        }  # fmt: skip
        if reward == 1.0:
            sample["trainer_logprobs"] = [None, -0.75]
        return {
            "picked": "random", "step": 30, "advantage": None, "rollout_id": rollout_id, "environment": "words",
            "task_key": "1", "agent": "", "reward": reward, "reward_parts": {"exact": reward}, "num_turns": 1,
            "finish_reason": "stop", "trace_id": None, "samples": [sample],
        }  # fmt: skip

    lines = [line("aaa", 0.25, "so so"), line("bbb", 1.0, "because"), line("ccc", 0.5, "maybe")]
    lines += [{"picked": "failed", "rollout_id": "ddd", "environment": "words", "reason": "INTERNAL", "message": "x"}]
    packed = zstandard.ZstdCompressor().compress("\n".join(map(json.dumps, lines)).encode())
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step_30.jsonl.zst").write_bytes(packed)
    return tmp_path


def test_the_worst_and_the_best_rollout_of_a_step_are_shown_whole(kept: Path) -> None:
    worst = meshrl("rollouts", "worst", "30", "-o", str(kept)).output
    assert "reward 0.250" in worst
    assert "2 tokens, 1 sampled by version 7, mean logprob -0.500" in worst
    assert "trainer" not in worst
    assert (
        "-0.500, the trainer's is -0.250 from it (at most 0.250)\n"
        in meshrl("rollouts", "best", "-o", str(kept)).output
    )
    assert worst.index("[user]\nwhy?") < worst.index("[assistant]\nso so")
    assert json.loads(meshrl("rollouts", "best", "--json", "-o", str(kept)).output)["rollout_id"] == "bbb"


def test_kept_rollouts_are_listed_with_the_reason_of_those_that_failed(kept: Path) -> None:
    listed = meshrl("rollouts", "samples", "-o", str(kept)).output.splitlines()
    assert [line.split()[0] for line in listed[1:]] == ["aaa", "bbb", "ccc", "ddd"]
    assert listed[-1].endswith("INTERNAL: x")


def test_a_step_or_an_environment_without_kept_rollouts_says_what_there_is(kept: Path) -> None:
    assert "there are those of 1 from 30 to 30" in meshrl("rollouts", "worst", "31", "-o", str(kept)).output
    assert "there are some of words" in meshrl("rollouts", "worst", "--env", "sums", "-o", str(kept)).output
    nothing = meshrl("rollouts", "worst", "-o", str(kept / "rollouts"))
    assert nothing.exit_code == 1
    assert "unless orchestrator.rollout_samples is None" in nothing.output
