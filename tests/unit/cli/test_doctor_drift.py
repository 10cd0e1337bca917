"""What `meshrl doctor --drift` refuses before it starts anything, and what it reads of a run that was made."""

import fcntl
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from meshrl.cli.doctor import noise_floor
from meshrl.cli.main import main
from meshrl.cli.run_folder import RunFolder


def refusal(folder: Path, *flags: str) -> str:
    done = CliRunner().invoke(main, ["doctor", "--drift", "-o", str(folder), *flags])
    assert done.exit_code == 1
    return done.output


def test_a_folder_that_rl_did_not_make_and_a_run_that_goes_on_are_refused(tmp_path: Path) -> None:
    assert "has no configs/rl.toml" in refusal(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/rl.toml").touch()
    with (tmp_path / "rl.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "goes on: it and another would share its devices; end it first" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--vary", "a=b"), "--vary is of --drift"),
        (("--drift", "--vary", "a"), "--vary must be KEY=VALUE"),
    ],
)
def test_a_change_that_is_none_is_refused(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(main, ["doctor", "-o", str(tmp_path), *flags])
    assert done.exit_code == 2
    assert words in done.output


def write_run(folder: Path, attn: str) -> None:
    names = ("mismatch_abs/all/mean", "mismatch_abs/all/max", "mismatch_kl/all/mean")
    lines = [{"step": step, **dict.fromkeys(names, step * 1e-3)} for step in (1, 2, 3)]
    (folder / "configs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "configs/trainer.toml").write_text(f'[model]\nattn = "{attn}"\n')


def test_the_noise_floor_is_over_all_steps(tmp_path: Path) -> None:
    write_run(tmp_path, "sdpa")
    floor = noise_floor(RunFolder(tmp_path), "", before=None)
    assert (floor.kernel, floor.steps, floor.most_abs) == ("sdpa", 3, 3e-3)
    assert (floor.mean_abs, floor.mean_kl) == (pytest.approx(2e-3), pytest.approx(2e-3))


def test_each_change_is_measured_in_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "eager")
    (tmp_path / "configs/rl.toml").touch()

    def rl(command: list[str], **_: object) -> SimpleNamespace:
        changed = command[-2:] == ["--trainer.model.attn", "sdpa"]
        write_run(Path(command[command.index("--output-dir") + 1]), "sdpa" if changed else "eager")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("meshrl.cli.doctor.subprocess.run", rl)
    flags = ["--vary", "trainer.model.attn=sdpa", "--json", "-o", str(tmp_path)]
    done = CliRunner().invoke(main, ["doctor", "--drift", *flags])
    floors = json.loads(done.stdout)
    assert [(one["changed"], one["kernel"]) for one in floors] == [("-", "eager"), ("trainer.model.attn=sdpa", "sdpa")]
    assert {path.name for path in (tmp_path / "drift").iterdir()} == {"1", "2"}
