"""What the project asks to be installed is what it uses."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[3]
IMPORT = re.compile(r"^\s*(?:from|import) ([a-zA-Z0-9_]+)", re.MULTILINE)


def test_every_dependency_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=!;\[ ]", line)[0] for line in project["dependencies"]}
    sources = [path.read_text() for folder in ("services", "clients/python") for path in (ROOT / folder).rglob("*.py")]
    imported = {name for source in sources for name in IMPORT.findall(source)}
    providers = packages_distributions()
    used = {each.lower().replace("_", "-") for name in imported for each in providers.get(name, ())}
    assert sorted(wanted - used) == []
