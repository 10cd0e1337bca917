"""Guards the shape of the project: one namespace in two source roots, and light programs stay light."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "transformers"}


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("source_root", ["services", "clients/python"])
def test_meshrl_is_a_namespace_package_in_both_source_roots(source_root: str) -> None:
    assert (ROOT / source_root / "meshrl").is_dir()
    assert not (ROOT / source_root / "meshrl" / "__init__.py").exists()


@pytest.mark.parametrize(
    "module", ["meshrl.client", "meshrl.wire.convert", "meshrl.weights.main", "meshrl.orchestrator.main"]
)
def test_clients_and_control_programs_start_without_torch(module: str) -> None:
    assert not HEAVY & modules_after(f"import {module}")


def test_every_console_script_names_a_function_that_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    statements = [f"from {target.replace(':', ' import ')}" for target in scripts.values()]
    assert len(statements) >= 8
    modules_after("\n".join(statements))


def test_the_readme_shows_the_two_commands_first() -> None:
    commands = re.findall(r"^make \w+", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]
