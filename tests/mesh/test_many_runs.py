"""Several runs in one mesh: started with it, joined to it and found by their folders; each has a ledger of its own."""

from __future__ import annotations

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
from mesh_run import PACED, Run, check_kill, of_orchestrator
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


def test_the_runs_of_the_example_lose_no_rollout_and_train_none_twice_though_programs_are_killed(
    start_run: Callable[..., Run], tmp_path: Path
) -> None:
    page = (ROOT / "configs" / "three_runs" / "README.md").read_text()
    command = shlex.split(next(line for line in page.splitlines() if line.startswith("uv run rl ")))
    names, steps = ("reverse_text", "letter_sort", "memory_game"), 8
    small = ["--max-steps", str(steps), "--ckpt.interval", "2", "--ckpt.keep-last", "2", "--restarts", "3"]
    for place in range(len(names)):
        sizes = {"batch-size": "8", "group-size": "4", "eval.num-examples": "4", "filters.zero-signal": "false"}
        small += [word for key, value in sizes.items() for word in (f"--runs.{place}.{key}", value)]
        small.append(f"--runs.{place}.logprob-check.fatal")
    Authority.create(tmp_path / "out" / "credentials", "main")  # as `meshrl run init` does
    mesh = start_run(*small, text=(ROOT / command[-1]).read_text())

    def newest() -> Sequence[int]:
        return [max(mesh.of(name).steps(), default=0) for name in names]

    # the orchestrator first, since it ends by itself once its run is trained
    for reached, victim in ((1, "orchestrator_letter_sort"), (3, "trainer"), (4, "weights"), (5, "inference")):
        mesh.wait_for(lambda least=reached: min(newest()) >= least)
        os.kill(mesh.pid(victim), signal.SIGKILL)
    assert mesh.finish(ENDS_S) == 0, mesh.console.read_text()
    assert mesh.log("rl").count("starting it again") == 4
    for name in names:
        run = mesh.of(name)
        check_ledger(run.output_dir, steps=steps, rollouts=8)
        assert f"{name} | " in mesh.console.read_text()  # its lines of the console
        assert {record["step"] for record in run.records() if f"eval/{name}_held_out/avg@1" in record} == {0, steps}
    assert not mesh.left_running()


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


def test_runs_join_a_mesh_or_are_found_in_its_folder_and_train_beside_its_own(
    start_run: Callable[..., Run], program: Start
) -> None:
    mesh = start_run(
        "--inference", "--max-steps", "400", "--trainer.model.lora.rank", "8", "--trainer.max-concurrent-runs", "2",
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
    mesh.wait_for(lambda: mesh.log("weights").count("is closed") == 2)
    mesh.wait_for(lambda: mesh.log("inference").count("is over: its requests end") == 2)

    files = [found_run(mesh.output_dir, f"run_{name}", seed) for seed, name in enumerate("cde", 1)]
    first, second, third = [orchestrator_of(program, mesh.output_dir, file) for file in files]
    for process, file in ((first, files[0]), (second, files[1])):
        ended(process)
        check_ledger(file.parents[1], steps=2, rollouts=8)
    assert third.poll() is None  # it waits: all places are taken, though two of their runs are trained
    assert "run 'run_e' waits for a place" in mesh.log("trainer")
    assert not (mesh.output_dir / "run_e" / "ledger.sqlite").exists()
    for command, line in ((["run", "suspend", "run_d"], "suspended"), (["doctor"], "meshrl run resume run_d lets")):
        assert line in CliRunner().invoke(main, [*command, "-o", str(mesh.output_dir)]).output
    files[0].unlink()
    said = ended(third)
    assert "the run run_e waits, for up to" in said
    check_ledger(files[2].parents[1], steps=2, rollouts=8)
    assert "run 'run_c' is deleted" in mesh.log("trainer")
    assert (mesh.output_dir / "run_c" / "ledger.sqlite").exists()  # what it wrote stays
    before = mesh.steps()[-1]
    mesh.wait_for(lambda: mesh.steps()[-1] > before + 1)  # its own run goes on
    check_kill(mesh, "inference")
