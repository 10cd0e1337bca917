"""`meshrl weights pin` and `rollback` on folders of runs that have ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshrl.cli.main import main
from meshrl.wire.saved_steps import pinned_steps


def meshrl(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Steps 10 and 20 were saved, of 30 the weights alone."""
    for folder in ("weights/step_10", "weights/step_20", "weights/step_30", "weights/step_40.partial"):
        (tmp_path / folder).mkdir(parents=True)
    for step in (10, 20):
        (tmp_path / f"checkpoints/step_{step}/trainer").mkdir(parents=True)
    (tmp_path / "checkpoints/step_30/orchestrator").mkdir(parents=True)
    return tmp_path


def test_a_step_is_pinned_and_given_free(ended: Path) -> None:
    said = "pinned steps, which ckpt.keep_last spares: "
    assert meshrl("weights", "pin", "30", "-o", str(ended)).output == f"{said}30\n"
    assert json.loads(meshrl("weights", "pin", "10", "--json", "-o", str(ended)).output) == {"pinned": [10, 30]}
    assert meshrl("weights", "unpin", "30", "-o", str(ended)).output == f"{said}10\n"
    assert meshrl("weights", "unpin", "30", "-o", str(ended)).exit_code == 0  # once more changes nothing
    assert pinned_steps(ended / "weights") == {10}


def test_a_run_that_has_ended_is_told_how_it_goes_on(ended: Path) -> None:
    by_hand = meshrl("weights", "rollback", "10", "-o", str(ended))
    assert by_hand.output.endswith("each program as it was started, the trainer with --ckpt.resume-step 10\n")
    (ended / "configs").mkdir()
    (ended / "configs/rl.toml").touch()
    told = meshrl("weights", "rollback", "10", "-o", str(ended))
    assert told.output == f"now, go on from step 10 with: rl @ {ended}/configs/rl.toml --ckpt.resume-step 10\n"
    assert pinned_steps(ended / "weights") == {10}
    assert json.loads(meshrl("weights", "rollback", "20", "--json", "-o", str(ended)).output)["ended"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("pin", "40"),
            "has no weights of step 40; it has those of 10, 20, 30, or save now: meshrl trainer checkpoint",
        ),
        (("rollback", "30"), "has no checkpoint to resume from of step 30; it has those of 10, 20, or save now"),
    ],
)
def test_a_step_that_is_not_saved_is_one_line_with_those_that_are(
    ended: Path, arguments: tuple[str, ...], words: str
) -> None:
    refused = meshrl("weights", *arguments, "-o", str(ended))
    assert refused.exit_code == 1
    assert words in refused.output
    assert len(refused.output.splitlines()) == 1
    assert not pinned_steps(ended / "weights")


def test_a_folder_without_checkpoints_names_the_key(tmp_path: Path) -> None:
    assert "it has none; set ckpt.interval, or save now" in meshrl("weights", "pin", "1", "-o", str(tmp_path)).output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_disk_that_takes_nothing_is_one_line(ended: Path) -> None:
    (ended / "weights").chmod(0o500)
    refused = meshrl("weights", "pin", "10", "-o", str(ended))
    (ended / "weights").chmod(0o700)
    assert (refused.exit_code, len(refused.output.splitlines())) == (1, 1)
    assert "cannot be changed: Permission denied; run this where the run's disk is" in refused.output
