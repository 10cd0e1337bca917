"""An example is one folder: it has a page, a copy of it works under another name, and the mesh needs none of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from meshrl.environments.letter_sort import letters
from meshrl.environments.memory_game.game import games
from meshrl.environments.nim.game import heaps
from meshrl.environments.reverse_text.sentences import sentences
from meshrl.environments.word_trail.trail import trails
from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import EnvConfig
from meshrl.environments import plugins
from meshrl.environments.plugins import plugin_id, split_choice
from meshrl.rollout import hosting

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
EXAMPLES = sorted(path.parent for path in CONFIGS.glob("*/rl.toml"))


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_an_example_has_a_page_with_the_commands_of_its_files(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    for command in ("sft", "rl", "eval"):
        assert f"uv run {command} @ configs/{folder.name}/{command}.toml" in page
    assert f"]({folder.name})" in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "args", "tasks"),
    [
        ("letter-sort", {}, [{"named": named} for named in letters.tasks("held_out")]),
        ("memory-game", {}, [{"words": words} for words in games("held_out")]),
        ("nim", {"against": "expert"}, [{"heap": heap, "against": "expert"} for heap in heaps("held_out")]),
        (
            "reverse-text",
            {},
            [
                {"prompt": text, "answer": text[::-1], "system_prompt": "Reverse the text."}
                for text in sentences("held_out")
            ],
        ),
        ("word-trail", {}, [{"answer": trail.words[-1]} for trail in trails("held_out")]),
    ],
)
def test_verifiers_finds_a_taskset_by_its_short_name_and_its_held_out_tasks(
    name: str, args: dict[str, str], tasks: list[dict[str, object]]
) -> None:
    found = plugin_id(name)
    taskset = taskset_class(found)(taskset_config_type(found)(id=found, split="held_out", **args))
    assert [{field: getattr(task.data, field) for field in tasks[0]} for task in taskset] == tasks


@pytest.mark.parametrize("name", ["letter_sort", "memory_game", "nim", "reverse_text", "word_trail"])
def test_a_copy_of_an_example_works_under_its_own_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CONFIGS / name, tmp_path / f"my_{name}", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", f"my_{name}.demonstrations", tmp_path / "data"],
        check=True, timeout=120, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (tmp_path / "data" / "train.jsonl").stat().st_size > 100_000
    monkeypatch.syspath_prepend(str(tmp_path))
    found = plugin_id(f"my-{name}")
    taskset = taskset_class(found)
    assert taskset.__module__ == f"my_{name}.taskset"
    ours = taskset_class(plugin_id(name))
    (mine, its) = (
        [task.data.prompt for task in each(taskset_config_type(at)(id=at))]
        for each, at in ((taskset, found), (ours, plugin_id(name)))
    )
    assert mine == its


def test_every_id_that_the_distribution_registers_is_a_module_of_its_own() -> None:
    project = tomllib.loads((CONFIGS / "pyproject.toml").read_text())
    registered = {found.name: found.value for found in entry_points(group="meshrl.environments")}
    assert registered == project["project"]["entry-points"]["meshrl.environments"]
    packages = set(project["tool"]["setuptools"]["packages"])
    assert set(registered.values()) <= packages
    for folder in EXAMPLES:
        assert f"meshrl.environments.{folder.name}" in packages


def test_an_id_with_a_colon_sets_the_option_of_its_family() -> None:
    assert split_choice("reasoning-gym:chain_sum") == ("meshrl.environments.reasoning_mix", {"dataset": "chain_sum"})
    assert split_choice("textarena:2048-v0") == ("meshrl.environments.textarena_games", {"game": "2048-v0"})
    with pytest.raises(ValueError, match="ids with a colon are reasoning_gym:<dataset>, textarena:<game>"):
        split_choice("nim:3")


@pytest.mark.parametrize("taskset", ["reverse_text", "reasoning_gym:chain_sum"])
def test_without_the_distribution_its_ids_are_refused_with_its_name(
    taskset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    plugins.registered.cache_clear()
    monkeypatch.setitem(sys.modules, "meshrl.environments.reverse_text", None)
    try:
        with pytest.raises(ConfigError, match="meshrl-examples"):
            hosting.configured(EnvConfig(id=taskset), harness="meshrl.environments.harness", max_turns=None)
    finally:
        plugins.registered.cache_clear()


def test_the_mesh_imports_no_example() -> None:
    examples = "|".join(folder.name for folder in EXAMPLES)
    imports = re.compile(
        rf"^\s*(?:from|import) (?:meshrl_examples|meshrl\.environments\.(?:{examples})\b)", re.MULTILINE
    )
    modules = [*(ROOT / "services").rglob("*.py"), *(ROOT / "clients").rglob("*.py")]
    assert len(modules) > 400
    assert [path for path in modules if imports.search(path.read_text())] == []
