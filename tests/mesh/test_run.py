"""Whole runs that finish: two at once, which train every step within the law, and one that resumes the other."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from ledger_audit import audit
from mesh_run import ENDS_S, WITH_WORKERS, Run
from meshrl.cli.run_folder import RunFolder
from meshrl.client.authority import Authority
from ranked_trainer import children

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(900)]
MAX_OFF_POLICY_STEPS = 8  # the default


@pytest.fixture(scope="module")
def finished(start_shared_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Two runs that were started at once and have trained four steps, by their levels of asynchrony.

    Environments of the first play in a worker. The second has an authority of its own: its programs speak TLS. Its
    steps are large enough to be seen in the mismatch.
    """
    flags = ("--max-steps", "4", "--ckpt.interval", "2", "--max-async-level")
    folder = tmp_path_factory.mktemp("runs")
    Authority.create(folder / "level_2" / "credentials", "main")  # as `meshrl run init` does
    more = {0: WITH_WORKERS, 2: ("--trainer.optim.lr", "1e-2")}
    runs = {
        level: start_shared_run(*flags, str(level), *more[level], output_dir=folder / f"level_{level}")
        for level in more
    }
    for run in runs.values():
        assert run.finish() == 0, run.console.read_text()
    return runs


@pytest.mark.parametrize("level", [0, 2])
def test_a_run_trains_every_step_within_the_law(finished: dict[int, Run], level: int) -> None:
    run = finished[level]
    steps = [record for record in run.records() if "reward/all/mean" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    bound = 0 if level == 0 else MAX_OFF_POLICY_STEPS  # a group that is late ages while others are trained
    assert all(record["off_policy/all/max"] <= bound for record in steps)
    assert all(record["policy/active_version"] == record["step"] for record in steps)
    if level == 0:
        assert max(record["mismatch_abs/all/mean"] for record in steps) < 1e-4
        assert max(record["mismatch_kl/all/mean"] for record in steps) < 1e-6
    with sqlite3.connect(run.output_dir / "ledger.sqlite") as ledger:
        states = dict(ledger.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))
    assert states["trained"] == 4 * 16
    assert set(states) <= {"trained", "dropped", "failed", "cancelled"}
    assert not run.left_running()


def ports(run: Run) -> set[str]:
    """Every port that the programs of a run listen on."""
    files = (run.output_dir / "configs").glob("*.toml")
    listening = [re.findall(r"^\[server\]\n(?:.+\n)*?port = (\d+)", path.read_text(), re.MULTILINE) for path in files]
    return {port for found in listening for port in found}


def test_the_programs_of_a_run_with_an_authority_know_each_other_by_certificates(finished: dict[int, Run]) -> None:
    plain, secret = finished[0], finished[2]
    shown = {"weights": "hub", "trainer": "publisher", "inference": "agent", "rollout": "rollout"}
    for program, role in (*shown.items(), ("orchestrator", "orchestrator")):
        assert re.search(rf"{role}/\S+ has a certificate of the run main", secret.log(program)), program
        assert "certificate" not in plain.log(program)
    assert " on https://127.0.0.1:" in secret.log("inference")
    assert not (secret.output_dir / "credentials" / "operator.token").exists()


def test_runs_that_start_at_once_train_beside_each_other(finished: dict[int, Run]) -> None:
    """Neither takes the other's ports, and each ends by itself."""
    runs = list(finished.values())
    assert [run.steps() for run in runs] == [[1, 2, 3, 4]] * 2
    assert [len(ports(run)) for run in runs] == [4, 4]  # rollout, trainer, weights and inference
    assert not ports(runs[0]) & ports(runs[1])
    assert not [pid for run in runs for pid in run.left_running()]


def test_kept_rollouts_have_the_logprobs_of_the_weights_that_trained_them(finished: dict[int, Run]) -> None:
    """Step 3 trains the weights of step 2, which are on disk: they give the trainer's side of each token's gap."""
    folder = RunFolder(finished[2].output_dir)
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


def test_the_noise_floor_of_a_run_is_below_its_mismatch(finished: dict[int, Run]) -> None:
    """`meshrl doctor --drift`: at learning rate 0 the mismatch is noise alone."""
    output_dir = str(finished[2].output_dir)
    command = [sys.executable, "-m", "meshrl.cli.main", "doctor", "--drift", "--steps", "2", "--json", "-o", output_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (floor,) = json.loads(done.stdout)
    assert floor["steps"] == 2
    assert floor["most_abs"] < 1e-4 < floor["before"], "rollouts of older versions differ more than the two programs"


def test_a_run_is_resumed_by_the_next_one_on_two_ranks_and_ends_when_one_of_them_is_killed(
    finished: dict[int, Run], start_shared_run: Callable[..., Run]
) -> None:
    output_dir = finished[2].output_dir
    flags = ("--max-steps", "500", "--ckpt.resume-step", "-1", "--deployment.num-train-gpus", "2")
    run = start_shared_run(*flags, output_dir=output_dir)
    run.wait_for(lambda: len(run.steps()) >= 6)
    assert run.steps()[:6] == [1, 2, 3, 4, 5, 6]
    assert "resumed" in run.log("trainer")
    assert "on 2 rank(s)" in run.log("trainer")
    logs = output_dir.glob("logs/trainer/torchrun/*/attempt_0/*/stdout.log")
    assert sorted(path.parent.name for path in logs) == ["0", "1"]
    ranks = children(run.pid("trainer"))
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    assert run.finish(ENDS_S) != 0
    console = run.console.read_text()  # the orchestrator, whose step failed, may be gone before the trainer is
    assert "trainer died: ended with exit code" in console or "the trainer stopped" in console
    assert "of trainer was killed by SIGKILL" in run.log("trainer")
    assert not run.left_running()
    assert audit(output_dir).violations == ()
