"""Several runs in one mesh: started with it, joined to it and found by their folders; each has a ledger of its own.

Two of the meshes end loudly, since a program of theirs is killed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from ledger_audit import audit
from mesh_run import MESH_TOML, PACED, Run, check_kill, of_orchestrator
from meshrl.cli.main import main
from meshrl.client.authority import Authority

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ENDS_S = 420.0


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def program() -> Iterator[Start]:
    """Starts programs; ends those that are left."""
    started: list[subprocess.Popen[str]] = []

    def start(module: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", module, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    said, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == code, said
    return said


def check_ledger(folder: Path, steps: int, rollouts: int) -> None:
    """Every rollout of a run has one row, and the run trained its steps, each once."""
    report = audit(folder)
    assert report.violations == ()
    assert (report.first_step, report.last_step, report.ended) == (1, steps, "run_ended")
    assert report.counts["trained", ""] == steps * rollouts


def test_the_command_of_the_example_trains_its_three_runs(model_dir: Path, tmp_path: Path) -> None:
    page = (ROOT / "configs" / "three_runs" / "README.md").read_text()
    command = shlex.split(next(line for line in page.splitlines() if line.startswith("uv run rl ")))
    out = tmp_path / "out"
    Authority.create(out / "credentials", "main")  # as `meshrl run init` does
    small = ["--max-steps", "2", "--output-dir", str(out), "--model.name", str(model_dir)]
    for run in range(3):
        small += [f"--runs.{run}.batch-size", "16", f"--runs.{run}.eval.num-examples", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "meshrl.launch.main", *command[3:], *small],
        cwd=ROOT, capture_output=True, text=True, timeout=ENDS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("reverse_text", "letter_sort", "memory_game"):
        check_ledger(out / f"run_{name}", steps=2, rollouts=16)
        assert f"{name} | " in done.stdout  # its lines of the console
        records = map(json.loads, (out / f"run_{name}" / "metrics.jsonl").read_text().splitlines())
        assert {record["step"] for record in records if f"eval/{name}_held_out/avg@1" in record} == {0, 2}


def joined_run(program: Start, mesh: Path, name: str, seed: int, *, in_the_form_of_rl: bool) -> subprocess.Popen[str]:
    config = mesh.parent / f"{name}.toml"
    keys = of_orchestrator(seed=seed, steps=3)
    if in_the_form_of_rl:
        config.write_text(
            f'run_id = "{name}"\noutput_dir = "elsewhere"\n[trainer]\nseq_len = 1024\nmodel.lora.rank = 4\n'
            f"optim.lr = 1e-3\n[inference]\n[orchestrator]\nrun.delete = true\n{keys}"
        )
    else:
        config.write_text(f'run_id = "{name}"\n{keys}\n[run]\nlr = 1e-3\ndelete = true\n[run.lora]\nrank = 4\n')
    return program("meshrl.launch.main", "@", str(config), "--mesh", str(mesh))


def test_runs_that_join_a_mesh_train_adapters_of_their_own_beside_its_run(
    start_run: Callable[..., Run], program: Start
) -> None:
    mesh = start_run(
        "--inference", "--max-steps", "400", "--trainer.model.lora.rank", "8", "--trainer.max-concurrent-runs", "3",
        "--orchestrator.logprob-check.fatal", *PACED,
    )  # fmt: skip
    mesh.wait_for(mesh.steps)
    joined = {
        name: joined_run(program, mesh.output_dir, name, seed, in_the_form_of_rl=name == "b")
        for seed, name in enumerate("ab", 1)
    }
    for name, process in joined.items():
        said = ended(process)
        assert f"made the run {name} at the trainer" in said
        assert "rollouts: dispatched 24 = trained 24 + dropped 0 + failed 0 + cancelled 0 + open 0" in said
        check_ledger(mesh.of(name).output_dir, steps=3, rollouts=8)
    before = mesh.steps()[-1]
    mesh.wait_for(lambda: mesh.steps()[-1] > before + 1)  # its own run goes on
    mesh.wait_for(lambda: mesh.log("weights").count("is closed") == 2)
    mesh.wait_for(lambda: mesh.log("inference").count("is over: its requests end") == 2)
    check_kill(mesh, "inference")


def found_run(mesh: Path, name: str, seed: int) -> Path:
    """The folder of a run as its owner makes it, in the spelling of the documents."""
    file = mesh / name / "control" / "orch.toml"
    file.parent.mkdir(parents=True)
    adapter = "[model.lora]\nrank = 4\nalpha = 8.0\n[optim]\nlr = 1e-3\n"
    file.write_text(of_orchestrator(seed=seed, steps=2) + adapter)
    return file


def orchestrator_of(program: Start, mesh: Path, file: Path) -> subprocess.Popen[str]:
    folder = str(file.parents[1])
    return program("meshrl.orchestrator.main", "@", str(file), "--mesh", str(mesh), "--output-dir", folder)


def test_of_three_folders_two_are_taken_up_and_the_third_once_one_is_deleted(
    start_run: Callable[..., Run], program: Start
) -> None:
    hosts = '[[rollout.env]]\nid = "reverse_text"\n'
    mesh = start_run("--trainer.max-concurrent-runs", "2", text=MESH_TOML + hosts)
    mesh.wait_for(lambda: "serving TrainerService" in mesh.log("trainer"))
    files = [found_run(mesh.output_dir, f"run_{name}", seed) for seed, name in enumerate("abc", 1)]
    first, second, third = [orchestrator_of(program, mesh.output_dir, file) for file in files]
    for process, file in ((first, files[0]), (second, files[1])):
        ended(process)
        check_ledger(file.parents[1], steps=2, rollouts=8)
    assert third.poll() is None  # it waits: both places are taken, though their runs are trained
    assert "run 'run_c' waits for a place" in mesh.log("trainer")
    assert not (mesh.output_dir / "run_c" / "ledger.sqlite").exists()
    for command, line in ((["run", "suspend", "run_b"], "suspended"), (["doctor"], "meshrl run resume run_b lets")):
        assert line in CliRunner().invoke(main, [*command, "-o", str(mesh.output_dir)]).output
    files[0].unlink()
    said = ended(third)
    assert "the run run_c waits, for up to" in said
    check_ledger(files[2].parents[1], steps=2, rollouts=8)
    assert "run 'run_a' is deleted" in mesh.log("trainer")
    assert (mesh.output_dir / "run_a" / "ledger.sqlite").exists()  # what it wrote stays
    check_kill(mesh, "weights")


def test_killed_programs_of_a_mesh_of_four_runs_lose_no_rollout_and_train_none_twice(
    start_run: Callable[..., Run],
) -> None:
    names, steps = "abcd", 12
    runs = [
        f'[[runs]]\nrun_id = "{name}"\n{of_orchestrator(seed=seed)}[runs.run]\nlr = 1e-3\nlora.rank = {seed}\n'
        for seed, name in enumerate(names, 1)
    ]
    mesh = start_run(
        "--max-steps", str(steps), "--ckpt.interval", "2", "--ckpt.keep-last", "2", "--restarts", "3",
        text=MESH_TOML + "".join(runs),
    )  # fmt: skip

    def newest() -> Sequence[int]:
        return [max(mesh.of(name).steps(), default=0) for name in names]

    # the orchestrator first, since it ends by itself once its run is trained
    for reached, victim in ((2, "orchestrator_b"), (4, "trainer"), (6, "weights"), (8, "inference")):
        mesh.wait_for(lambda least=reached: min(newest()) >= least)
        os.kill(mesh.pid(victim), signal.SIGKILL)
    assert mesh.finish(ENDS_S) == 0, mesh.console.read_text()
    assert mesh.log("rl").count("starting it again") == 4
    for name in names:
        check_ledger(mesh.of(name).output_dir, steps=steps, rollouts=8)
    assert not mesh.left_running()
