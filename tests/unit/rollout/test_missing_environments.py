"""An environment that cannot be imported says what is missing and how it gets here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import EnvConfig
from meshrl.rollout import hosting


def refusal(env_id: str, **args: object) -> str:
    with pytest.raises(ConfigError) as refused:
        hosting.configured(EnvConfig(id=env_id, args=args), harness="meshrl.environments.harness", max_turns=None)
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_taskset_of_the_hub_is_told_with_both_commands_that_install_it():
    assert refusal("primeintellect/alphabet-sort@0.1.2") == (
        "environment 'primeintellect/alphabet-sort@0.1.2': 'primeintellect/alphabet-sort@0.1.2' cannot be loaded: no"
        f" module 'alphabet_sort' is installed in {sys.prefix}. One of the Environments Hub: `prime env install"
        " primeintellect/alphabet-sort`, or `uv pip install alphabet-sort --extra-index-url"
        " https://hub.primeintellect.ai/primeintellect/simple/`. Your own: `uv pip install -e path/to/alphabet-sort`,"
        " or no installation: put the folder that holds alphabet_sort on PYTHONPATH"
    )


def test_a_name_that_is_nearly_a_bundled_one_is_asked_about():
    assert "Did you mean 'reverse_text'?" in refusal("revers-text")


def test_a_dotted_module_is_ones_own():
    said = refusal("my_tasks.words")
    assert "no module 'my_tasks.words' is installed" in said
    assert said.endswith("put the folder that holds my_tasks on PYTHONPATH")
    assert "prime env install" not in said


def test_a_package_that_a_taskset_imports_is_named(folder: Path):
    (folder / "mesh_needs_more.py").write_text("import mesh_not_there\n")
    assert "mesh_needs_more imports mesh_not_there, which is not installed" in refusal("mesh-needs-more")


def test_an_environment_of_the_older_api_is_told_from_one_that_is_not_there(folder: Path):
    (folder / "mesh_old_words.py").write_text(
        "import verifiers as vf\n\n\ndef load_environment(n: int = 3):\n    return vf.SingleTurnEnv()\n"
    )
    said = refusal("mesh-old-words")
    assert "module 'mesh_old_words' is an environment of the older verifiers API (load_environment)" in said
    assert "orchestrator.services.rollout" in said


def test_a_module_that_breaks_as_it_is_imported_is_named_with_its_error(folder: Path):
    (folder / "mesh_breaks.py").write_text("1 / 0\n")
    assert refusal("mesh_breaks").endswith("its import failed with ZeroDivisionError: division by zero")


def test_an_unknown_environment_or_harness_is_told_in_the_words_of_verifiers():
    assert "environment 'user_sm' not found" in refusal("user_sm+reverse_text")
    assert "harness 'nul' not found" in refusal("reverse_text", agent={"harness": {"id": "nul"}})
