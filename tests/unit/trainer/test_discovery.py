"""Runs that have a folder: taken up, refused with the reason, evicted, and forgotten with their folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import hook_calls
from many_runs import ManyRuns, load, many_runs, settings
from meshrl.trainer.ranks.rank_runs import RunMaker
from meshrl.trainer.runs.discovery import Discovery
from meshrl.trainer.runs.hooks import RunHooks, RunHooksConfig
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.wire.types import RunPhase, Suspension
from tiny_qwen3 import save_tiny_qwen3

GOOD = '[model.lora]\nrank = 4\nalpha = 8\nname = "a"\n[optim]\nlr = 0.001\n[train]\nbatch_size = 8\n'
HOOKS = RunHooksConfig(
    discovered=["hook_calls.discovered"],
    forgotten=["hook_calls.forgotten"],
    creation=["hook_calls.creation"],
    deletion=["hook_calls.deletion"],
    config_validation=["hook_calls.config_validation"],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=48)


def write(output_dir: Path, run_id: str, text: str) -> Path:
    control = output_dir / run_id / "control"
    control.mkdir(parents=True, exist_ok=True)
    (control / "orch.toml").write_text(text)
    return control


def held(mesh: ManyRuns) -> list[str]:
    return [queue.book.run_id for queue in mesh.table][1:]


async def test_a_run_comes_with_its_folder_and_goes_with_it_and_the_next_one_takes_its_place(
    model: str, tmp_path: Path
) -> None:
    hook_calls.CALLS.clear()
    hooks = RunHooks(HOOKS)
    for name in "abc":
        write(tmp_path, f"run_{name}", GOOD.replace("rank = 4", f"rank = {4 + ord(name) - ord('a')}"))
    (tmp_path / "run_empty").mkdir()
    async with many_runs(load(model), tmp_path, max_runs=2, hooks=hooks) as mesh:
        discovery = Discovery(mesh.host, hooks, tmp_path)
        await discovery.look()
        await discovery.look()
        assert held(mesh) == ["run_a", "run_b"]
        await mesh.train("run_a", [1, 2])
        shutil.rmtree(tmp_path / "run_a")
        await discovery.look()
        assert held(mesh) == ["run_b", "run_c"]
        assert mesh.trainings["run_c"].state.adapters.scale.rank == 6
        await mesh.train("run_c", [1])
        assert not (tmp_path / "run_a").exists()
    assert hook_calls.CALLS == [
        ("creation", 0, "run_a"),
        ("discovered", 0, "run_a", 4),
        ("creation", 1, "run_b"),
        ("discovered", 1, "run_b", 5),
        ("deletion", 0, "run_a"),
        ("forgotten", 0, "run_a"),
        ("creation", 0, "run_c"),
        ("discovered", 0, "run_c", 6),
    ]


WRONG = {
    "[model.lora\n": r"Expected '\]'",
    "[model.lora]\nrank = 0\n": r"lora\.rank: Input should be greater than or equal to 1",
    "[optim]\nlr = 0.1\nmomenta = 2\n": r"optim\.momenta: ",
    "[model.lora]\nrank = 4\ntarget_modules = ['wo']\n": "'wo' names no linear layer",
    "[model.lora]\nrank = 13\n": "thirteen is refused by a hook",
    "[ckpt]\nresume_step = 7\n": "a run goes on from its newest checkpoint; set it to -1",
    "[optim]\nlr = 0.1\nmomentum = 0.5\n": r"optim\.momentum belongs to optim\.type muon or sgd, not to adamw",
    "[scheduler]\nmin_lr = 0.1\n": r"scheduler\.min_lr belongs to scheduler\.type linear",
    "[scheduler]\ntype = 'cosine'\n": r"needs scheduler\.decay_steps or max_steps",
}
"""Files, and what is written beside each."""


async def test_a_file_that_is_wrong_is_explained_beside_it_until_it_is_right(model: str, tmp_path: Path) -> None:
    hooks = RunHooks(HOOKS)
    async with many_runs(load(model), tmp_path, hooks=hooks) as mesh:
        discovery = Discovery(mesh.host, hooks, tmp_path)
        for text, why in WRONG.items():
            problem = write(tmp_path, "run_a", text) / "config_validation_error.txt"
            await discovery.look()
            assert held(mesh) == []
            assert re.search(why, problem.read_text()), problem.read_text()
            problem.unlink()
            await discovery.look()
            assert not problem.exists()  # the file is as it was, so nothing is tried again
        write(tmp_path, "run_a", GOOD)
        await discovery.look()
        assert held(mesh) == ["run_a"]


async def test_why_a_run_is_evicted_stands_in_its_folder_and_it_goes_on_once_that_is_deleted(
    model: str, tmp_path: Path
) -> None:
    hooks = RunHooks()
    control = write(tmp_path, "run_a", GOOD)
    async with many_runs(load(model), tmp_path, hooks=hooks) as mesh:
        discovery = Discovery(mesh.host, hooks, tmp_path)
        await discovery.look()
        book = mesh.table.find("run_a").book
        book.suspension = Suspension(message="an operator wants to look at it")
        await discovery.look()
        assert not (control / "evicted.txt").exists()
        book.suspension = Suspension(reason="STEP_FAILED", message="3 steps in a row failed")
        await discovery.look()
        assert (control / "evicted.txt").read_text() == "3 steps in a row failed\n"
        await discovery.look()
        assert book.info().phase is RunPhase.SUSPENDED
        (control / "evicted.txt").unlink()
        await discovery.look()
        await mesh.train("run_a", [1])


def test_a_creation_hook_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="a creation hook failed: bad has no place"):
        RunHooks(HOOKS).created("bad")


@pytest.mark.parametrize("failed_here", [True, False])
def test_a_run_that_a_hook_refuses_on_one_rank_is_refused_on_all(
    model: str, tmp_path: Path, *, failed_here: bool
) -> None:
    hook_calls.CALLS.clear()
    group = OneOfTwo()
    maker = RunMaker(load(model, group), tmp_path, base_name="base", hooks=RunHooks(HOOKS))
    group.other_rank = iter([False, not failed_here])  # it has memory, and then its hook fails
    with pytest.raises(ValueError, match="bad has no place" if failed_here else "failed on another rank"):
        maker.make("bad" if failed_here else "a", settings("small"))
    maker.make("b", settings("small"))
    undone = [] if failed_here else [("creation", 0, "a"), ("deletion", 0, "a")]
    assert [*undone, ("creation", 0, "b")] == hook_calls.CALLS


class OneOfTwo(RankGroup):
    """`other_rank` answers for the rank that is not here."""

    other_rank: Iterator[bool] = iter(())

    def any(self, flag: bool) -> bool:
        return next(self.other_rank, False) or flag


def test_hooks_that_cannot_be_called_are_refused_with_their_key() -> None:
    with pytest.raises(ValueError, match=r"trainer\.run_hooks\.discovered.*cannot be called as forgotten"):
        RunHooks(RunHooksConfig(discovered=["hook_calls.forgotten"]))
