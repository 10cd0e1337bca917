"""What `rl` does before and after the programs run."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

from meshrl.core.config import load_config
from meshrl.core.paths import Layout
from meshrl.core.private_folders import versions_folder
from meshrl.launch.compose import Part
from meshrl.launch.config import RLConfig
from meshrl.launch.main import (
    checked,
    checkpoints,
    main,
    placed,
    programs,
    temporary_folders,
    write_configs,
)
from meshrl.launch.ports import FreePorts

FILES = ["inference.toml", "orchestrator.toml", "rl.toml", "rollout.toml", "trainer.toml", "weights.toml"]


def load(output_dir: Path, *argv: str) -> RLConfig:
    arguments = ["--orchestrator.train.env.0.id", "x", "--inference", "--output-dir", str(output_dir), *argv]
    return load_config(RLConfig, arguments, prog="rl", environ={})


def parts_of(output_dir: Path, *argv: str) -> tuple[Part, ...]:
    with FreePorts() as ports:
        return checked(load(output_dir, "--no-preflight", *argv), ports)[0]


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int | str | None:
    flags = ["--orchestrator.train.env.0.id", "x", "--inference", "--no-preflight"]
    monkeypatch.setattr(sys, "argv", ["rl", *flags, *argv])
    with pytest.raises(SystemExit) as leaving:
        main()
    return leaving.value.code


def test_dry_run_writes_the_configurations_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--output-dir", str(tmp_path / "run"), "--dry-run") == 0
    assert sorted(path.name for path in (tmp_path / "run" / "configs").iterdir()) == FILES
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["configs"]
    assert capsys.readouterr().out == (
        f"dry run: the configuration is valid; resolved files are in {tmp_path / 'run' / 'configs'}\n"
    )


def test_dry_run_cleans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    assert run_main(monkeypatch, "--output-dir", str(tmp_path), "--dry-run", "--clean-output-dir") == 0
    assert (tmp_path / "logs").exists()


def test_written_configuration_neither_cleans_nor_stays_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_main(monkeypatch, "--output-dir", str(tmp_path), "--dry-run", "--clean-output-dir") == 0
    again = load_config(RLConfig, ["@", str(tmp_path / "configs" / "rl.toml")], prog="rl", environ={})
    assert (again.clean_output_dir, again.dry_run) == (False, False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--output-dir", "TMP", "--clean-output-dir"), "rl: clean_output_dir: TMP is not emptied"),
        (("--output-dir", "TMP/thesis.tex/run"), "cannot be written: Not a directory; choose another"),
        (("--output-dir", "TMP/run", "--inference.python", "TMP/none"), "inference.python: 'TMP/none' is no program"),
    ],
)
def test_a_path_that_cannot_be_used_ends_with_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert run_main(monkeypatch, *(word.replace("TMP", str(tmp_path)) for word in argv)) == 2
    assert message.replace("TMP", str(tmp_path)) in capsys.readouterr().err


def test_a_start_does_not_miss_programs_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/trainer.json").write_text("{}")  # of one that was killed
    monkeypatch.setattr("meshrl.launch.main._supervise", lambda *arguments, **options: 0)
    assert run_main(monkeypatch, "--output-dir", str(tmp_path)) == 0
    assert not (tmp_path / "state").exists()


def test_every_program_is_started_from_its_own_file_and_can_be_run_as_a_module(tmp_path: Path) -> None:
    parts, layout = parts_of(tmp_path, "--num-engines", "2"), Layout(tmp_path)
    write_configs(layout, {part.name: part.config for part in parts})
    started = programs(parts, layout)
    assert {"inference", "inference_2"} <= {program.name for program in started}
    for program in started:
        executable, dash_m, module, at, path = program.command
        assert (executable, dash_m, at) == (sys.executable, "-m", "@")
        assert Path(path).read_text()
        assert program.log == layout.logs / "attempt_1" / f"{program.name}.log"
        assert program.environ["MESHRL_SECTION"] == program.name
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        assert 'if __name__ == "__main__":\n    main()' in Path(spec.origin).read_text(), module
    assert [program.name for program in programs(parts, layout) if program.leader] == ["orchestrator"]


def interpreter(path: Path, *options: str) -> Path:
    """Another python, with the packages of this one unless options say otherwise."""
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(options)} "$@"\n')
    path.chmod(0o755)
    return path


def test_an_engine_may_have_an_interpreter_of_its_own(tmp_path: Path) -> None:
    other = interpreter(tmp_path / "python")
    parts = parts_of(tmp_path / "run", "--inference.python", str(other))
    started = {program.name: program for program in programs(parts, Layout(tmp_path / "run"))}
    assert started["inference"].command[:3] == [str(other), "-m", "meshrl.inference.main"]
    assert started["trainer"].command[0] == sys.executable


def test_an_interpreter_without_meshrl_ends_with_code_2_and_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = interpreter(tmp_path / "python", "-I", "-S")  # without its environment's packages
    assert run_main(monkeypatch, "--output-dir", str(tmp_path / "run"), "--inference.python", str(bare)) == 2
    told = capsys.readouterr().err
    assert f"{str(bare)!r} finds no meshrl.inference.main; install meshrl there" in told
    assert "pip install 'meshrl[inference]'" in told


def test_gpus_that_are_not_there_end_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    arguments = ["--output-dir", str(tmp_path / "run"), "--deployment.num-infer-gpus", "2", "--dry-run"]
    assert run_main(monkeypatch, *arguments) == 2
    assert "inference takes 2 GPU(s) and training 1, but 2 are visible here" in capsys.readouterr().err
    assert run_main(monkeypatch, *arguments, "--trainer-gpu-ids", "1", "--inference-gpu-ids", "0,1") == 0


def test_the_log_says_who_works_where(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "--trainer-gpu-ids", "0", "--inference-gpu-ids", "0,1")
    assert placed(parts) == [
        "inference works on GPU 0, which the trainer shares",
        "inference_2 works on GPU 1",
        "trainer works on GPU 0",
    ]


def test_what_killed_programs_leave_outside_of_the_folder_is_known(tmp_path: Path) -> None:
    assert temporary_folders(parts_of(tmp_path, "--num-engines", "2")) == [versions_folder(tmp_path)]
    running = ("--orchestrator.services.trainer", "h:1", "--orchestrator.services.weights", "h:2")
    assert temporary_folders(parts_of(tmp_path, *running)) == []


def test_a_trainer_goes_on_from_what_this_run_has_written_whatever_the_clock_is(tmp_path: Path) -> None:
    def resumed(*steps: int, age_s: float = 0.0) -> list[str]:
        for step in steps:
            folder = tmp_path / "checkpoints" / f"step_{step}" / "trainer"
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder, (time.time() - age_s, time.time() - age_s))
        return [*trainer.resumed()]

    (tmp_path / "checkpoints/step_9/trainer").mkdir(parents=True)  # of an earlier run
    (trainer,) = [one for one in programs(parts_of(tmp_path), Layout(tmp_path)) if one.name == "trainer"]
    assert resumed() == []
    assert resumed(2, 4, age_s=3600.0) == ["--ckpt.resume-step", "4"]  # the clock was set back
    assert resumed(9) == ["--ckpt.resume-step", "9"]


def test_a_checkpoint_without_the_trainers_part_is_none_to_go_on_from(tmp_path: Path) -> None:
    """It is being written, or cleaned away at this moment."""
    (tmp_path / "checkpoints" / "step_2" / "trainer").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_4" / "orchestrator").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_6").symlink_to("nowhere")  # listed, and not there when it is looked at
    (tmp_path / "checkpoints" / "step_1.deleted" / "trainer").mkdir(parents=True)  # its trainer died deleting it
    assert [*checkpoints(Layout(tmp_path))] == [2]
