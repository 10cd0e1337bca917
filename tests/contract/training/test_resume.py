"""Training that goes on in another process, or on another number of them, from where it was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import checkpoint_kit as kit
import forked_ranks
import resumed_training

pytestmark = pytest.mark.timeout(700)  # processes of their own that import torch, on a machine that may be busy
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "lora": {"lora": {"rank": 4, "dropout": 0.3}}}
HALF, WHOLE = 6, 10  # the learning rate warms up for five steps
SAVED = str(HALF)
Results = dict[str, dict[str, Any]]


def on_two_ranks(folder: Path, *stages: dict[str, Any]) -> list[Results]:
    """Each stage is trained by two new processes, after the one before."""
    arguments: list[str] = []
    for number, parts in enumerate(stages):
        arguments += ["--"] * bool(arguments) + [str(folder / "model"), str(folder / str(number)), json.dumps(parts)]
    done = subprocess.run(
        [sys.executable, forked_ranks.__file__, "2", resumed_training.__file__, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / str(number)).read_text()) for number in range(len(stages))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """Whole trainings by one process and by two, saved on the way; then, in fresh processes, their second halves."""
    folder = tmp_path_factory.mktemp("resume")
    model = kit.save_model(folder / "model")

    def begun(ranks: str) -> dict[str, Any]:
        return {
            name: {"settings": settings, "folder": f"{folder}/{ranks}/{name}", "to": WHOLE, "save": [3, HALF]}
            | {"in_background": name == "plain"}
            for name, settings in SETTINGS.items()
        }

    def resumed(on: str) -> dict[str, Any]:
        return {
            f"{name} of {ranks} on {on}": {
                "settings": settings,
                "folder": f"{folder}/{ranks}/{name}",
                "at": -1,
                "to": WHOLE if on == ranks else HALF + 2,
                "alone": on == "one",
            }
            for name, settings in SETTINGS.items()
            for ranks in ("one", "two")
        }

    straight = {"straight": {"settings": {}, "folder": f"{folder}/straight", "to": WHOLE}}
    alone = begun("one") | straight
    one = {name: resumed_training.run_part({**part, "alone": True}, model) for name, part in alone.items()}
    again = resumed("one") | resumed("two")
    again |= {
        f"hsdp of {ranks} on two": {
            **again[f"plain of {ranks} on two"],
            "settings": {"dp_replicate": 2},
            "to": HALF + 2,
        }
        for ranks in ("one", "two")
    }
    two, afterwards = on_two_ranks(folder, begun("two") | straight, again)
    return {"one": one, "two": two, "again": afterwards}


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", SETTINGS)
def test_fresh_processes_go_on_to_the_bit(name: str, ranks: str, results: dict[str, Results]) -> None:
    whole, resumed = results[ranks][name], results["again"][f"{name} of {ranks} on {ranks}"]
    assert resumed["loaded"] == whole["saved"][SAVED]
    assert resumed["steps"] == whole["steps"][HALF:]
    assert resumed["final"] == whole["final"]
    assert (resumed["samples"], resumed["on_disk"]) == (100 * HALF, [3, HALF])


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_saving_in_the_background_changes_nothing(ranks: str, results: dict[str, Results]) -> None:
    saving, straight = results[ranks]["plain"], results[ranks]["straight"]
    assert saving["steps"] == straight["steps"]
    assert saving["final"] == straight["final"]
    assert (saving["on_disk"], straight["on_disk"]) == ([3, HALF], [])


@pytest.mark.parametrize(("before", "after"), [("one", "two"), ("two", "one")])
@pytest.mark.parametrize("name", SETTINGS)
def test_another_number_of_ranks_goes_on_from_the_same_bits(
    name: str, before: str, after: str, results: dict[str, Results]
) -> None:
    whole, resumed = results[before][name], results["again"][f"{name} of {before} on {after}"]
    assert resumed["loaded"] == whole["saved"][SAVED]
    if name == "plain":  # dropout draws other numbers on another number of ranks
        assert_close(resumed["steps"], whole["steps"][HALF : HALF + 2])


@pytest.mark.parametrize("before", ["one", "two"])
def test_hsdp_goes_on_from_what_others_saved(before: str, results: dict[str, Results]) -> None:
    whole, resumed = results[before]["plain"], results["again"][f"hsdp of {before} on two"]
    assert resumed["loaded"] == whole["saved"][SAVED]
    assert_close(resumed["steps"], whole["steps"][HALF : HALF + 2])


def assert_close(got: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """The ranks add in another order, and records come in another one."""
    assert [step["step"] for step in got] == [step["step"] for step in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["lr"] == theirs["lr"]
