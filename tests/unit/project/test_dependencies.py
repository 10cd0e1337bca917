"""What the distributions ask to be installed is what they use, and a program needs no more than its extra."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
    "meshrl.launch.main": ("meshrl.orchestrator.build",),
    "meshrl.launch.preflight.plugins": ("meshrl.launch.compose",),
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


DISTRIBUTIONS = {"meshrl": ".", "meshrl-client": "clients/python"}
"""Those of this repository that others depend on, and their folders."""
COMES_WITH = {
    "mcp": "verifiers", "mcp_types": "verifiers", "pyarrow": "datasets", "pydantic_core": "pydantic", "triton": "torch",
    "yarl": "aiohttp",
}  # fmt: skip
"""Packages that are imported only where another one is, and that one."""


def declared(folder: str) -> set[str]:
    """What a distribution and those of this repository that it depends on may install."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project.get("optional-dependencies", {}).values())]
    wanted = {re.split(r"[<>=!;\[ ]", line)[0] for line in lines}
    ours = [DISTRIBUTIONS[name] for name in wanted & DISTRIBUTIONS.keys() if DISTRIBUTIONS[name] != folder]
    return wanted.union(*map(declared, ours))


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize(
    ("folder", "sources"),
    [
        ("clients/conformance", "meshrl_conformance"), ("clients/python", "meshrl"),
        ("clients/verifiers_v0", "meshrl_verifiers_v0"), ("configs", "."), (".", "services"),
    ],
)  # fmt: skip
def test_every_import_is_of_a_dependency(folder: str, sources: str) -> None:
    providers, wanted = packages_distributions(), declared(folder)
    imported = {name for path in (ROOT / folder / sources).rglob("*.py") for name in imports_of(path)}
    others = {name for name in imported - sys.stdlib_module_names if not name.startswith("meshrl")}
    missing = [
        name
        for name in others - COMES_WITH.keys()
        if not wanted & {each.lower().replace("_", "-") for each in providers.get(name, [name])}
    ]
    assert missing == []
    assert {COMES_WITH[name] for name in others & COMES_WITH.keys()} <= wanted


@pytest.mark.timeout(330)  # imports, on a machine that may be busy
@pytest.mark.parametrize("modules", sorted(NEEDS_LESS))
def test_a_program_is_imported_without_what_others_need(modules: str) -> None:
    command = [sys.executable, "-c", IMPORT_WITHOUT, modules, *NEEDS_LESS[modules]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
