"""What the distributions ask to be installed is what they use, and a program needs no more than its extra."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IMPORT = re.compile(r"^\s*(?:from|import) ([a-zA-Z0-9_]+)", re.MULTILINE)
TRAINING = ("torch", "wandb", "matplotlib", "vllm")
ENVIRONMENTS = ("verifiers", "renderers", "transformers", "tokenizers", "aiohttp")
NEEDS_LESS = {  # modules of programs: what cannot be imported while they are
    "meshrl.client": (*TRAINING, *ENVIRONMENTS, "pydantic", "loguru", "meshrl.core"),
    "meshrl.weights.main meshrl.orchestrator.main meshrl.launch.main": (*TRAINING, *ENVIRONMENTS),
    "meshrl.rollout.main": TRAINING,
}
IMPORT_WITHOUT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in sys.argv[2:]):
            raise ModuleNotFoundError(f"{name} is not in this program's extra", name=name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[1].split():
    importlib.import_module(module)
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!;\[ ]", line)[0] for line in requirements} - {"meshrl"}


@pytest.mark.parametrize(("folder", "sources"), [("clients/python", "meshrl"), ("configs", "."), (".", "services")])
def test_every_dependency_is_imported(folder: str, sources: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    wanted = names(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        wanted |= names(extra)
    if "meshrl-client" in wanted:
        wanted.remove("meshrl-client")
    texts = [path.read_text() for path in (ROOT / folder / sources).rglob("*.py")]
    imported = {name for text in texts for name in IMPORT.findall(text)}
    providers = packages_distributions()
    used = {each.lower().replace("_", "-") for name in imported for each in providers.get(name, ())}
    by_verifiers = {"textarena", "nltk"}  # its taskset textarena imports them
    assert sorted(wanted - used - by_verifiers - {"vllm"}) == []
    assert "vllm" not in wanted or "vllm" in imported


@pytest.mark.timeout(330)  # imports, on a machine that may be busy
@pytest.mark.parametrize("modules", sorted(NEEDS_LESS))
def test_a_program_is_imported_without_what_others_need(modules: str) -> None:
    command = [sys.executable, "-c", IMPORT_WITHOUT, modules, *NEEDS_LESS[modules]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
