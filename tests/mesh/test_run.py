"""A whole run that trains every step within the law and finishes, and one that resumes it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from ledger_audit import audit
from mesh_run import Run, check_law
from meshrl.cli.run_folder import RunFolder
from meshrl.client.authority import Authority
from ranked_trainer import children

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(900)]
MAX_OFF_POLICY_STEPS = 8  # the default


@pytest.fixture(scope="module")
def finished(start_shared_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """It has trained four steps at level 2 of asynchrony, large enough to be seen in the mismatch.

    It has an authority of its own: its programs speak TLS.
    """
    folder = tmp_path_factory.mktemp("runs") / "level_2"
    Authority.create(folder / "credentials", "main")  # as `meshrl run init` does
    flags = ("--max-steps", "4", "--ckpt.interval", "2", "--max-async-level", "2", "--trainer.optim.lr", "1e-2")
    run = start_shared_run(*flags, output_dir=folder)
    assert run.finish() == 0, run.console.read_text()
    return run


def test_a_run_trains_every_step_within_the_law(finished: Run) -> None:
    # a group that is late ages while others are trained
    check_law(finished, steps=4, most_off_policy=MAX_OFF_POLICY_STEPS)


def test_the_programs_of_a_run_with_an_authority_know_each_other_by_certificates(finished: Run) -> None:
    shown = {"weights": "hub", "trainer": "publisher", "inference": "agent", "rollout": "rollout"}
    for program, role in (*shown.items(), ("orchestrator", "orchestrator")):
        assert re.search(rf"{role}/\S+ has a certificate of the run main", finished.log(program)), program
    assert " on https://127.0.0.1:" in finished.log("inference")
    assert not (finished.output_dir / "credentials" / "operator.token").exists()


def test_kept_rollouts_have_the_logprobs_of_the_weights_that_trained_them(finished: Run) -> None:
    """Step 3 trains the weights of step 2, which are on disk: they give the trainer's side of each token's gap."""
    folder = RunFolder(finished.output_dir)
    model = AutoModelForCausalLM.from_pretrained(folder.path / "weights" / "step_2", dtype=torch.float32).eval()
    kept = [line for line in folder.samples(3) if line.get("advantage") is not None]
    assert kept
    for line in kept:
        for sample in line["samples"]:
            ids = torch.tensor(sample["token_ids"])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1] / sample["temperature"]
            own = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
            sampled = [place for place, logprob in enumerate(sample["logprobs"]) if logprob is not None]
            assert [place for place, found in enumerate(sample["trainer_logprobs"]) if found is not None] == sampled
            gaps = [sample["trainer_logprobs"][place] - sample["logprobs"][place] for place in sampled]
            assert gaps == pytest.approx([own[place - 1] - sample["logprobs"][place] for place in sampled], abs=1e-4)


def test_the_noise_floor_of_a_run_is_below_its_mismatch(finished: Run) -> None:
    """`meshrl doctor --drift`: at learning rate 0 the mismatch is noise alone."""
    output_dir = str(finished.output_dir)
    command = [sys.executable, "-m", "meshrl.cli.main", "doctor", "--drift", "--steps", "2", "--json", "-o", output_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (floor,) = json.loads(done.stdout)
    assert floor["steps"] == 2
    assert floor["most_abs"] < 1e-4 < floor["before"], "rollouts of older versions differ more than the two programs"


def test_a_run_is_resumed_by_the_next_one_on_two_ranks_and_outlives_the_deaths_of_its_programs(
    finished: Run, start_shared_run: Callable[..., Run]
) -> None:
    output_dir = finished.output_dir
    run = start_shared_run(
        "--max-steps", "18", "--ckpt.resume-step", "-1", "--ckpt.interval", "2", "--ckpt.keep-last", "2",
        "--deployment.num-train-gpus", "2", "--restarts", "3", "--engine-restarts", "1", output_dir=output_dir,
    )  # fmt: skip

    def trains(more: int) -> None:
        newest = max(run.steps())
        run.wait_for(lambda: max(run.steps()) >= newest + more)

    trains(2)
    assert run.steps()[:6] == [1, 2, 3, 4, 5, 6]
    assert "resumed" in run.log("trainer")
    assert "on 2 rank(s)" in run.log("trainer")
    logs = output_dir.glob("logs/trainer/torchrun/*/attempt_0/*/stdout.log")
    assert sorted(path.parent.name for path in logs) == ["0", "1"]
    engine = run.pid("inference")
    os.kill(engine, signal.SIGKILL)
    trains(3)  # it has caught up
    assert run.pid("inference") != engine
    ranks = children(run.pid("trainer"))
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    trains(2)
    os.kill(run.pid("orchestrator"), signal.SIGKILL)
    assert run.finish(deadline_s=360.0) == 0, run.console.read_text()
    assert "of trainer was killed by SIGKILL" in run.log("trainer")
    assert run.log("rl").count("starting it again") >= 3  # an orchestrator may end with the trainer of its step
    assert "programs start " in run.log("rl")
    report = audit(output_dir)
    assert report.violations == ()
    assert (report.last_step, report.ended) == (18, "run_ended")
    assert not run.left_running()
