"""The map of the tests' kits names what there is, and a kit lies beside the suite that alone uses it."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]
SUPPORT = TESTS / "support"
README = (SUPPORT / "README.md").read_text(encoding="utf-8")
PROGRAMS_AND_DATA = {"tasksets", "benchmarks", "gpu"}
"""Folders whose modules are no kits: tasksets that verifiers loads, programs, and tests that CI cannot run."""
FOR_THE_RUN = {"side_by_side", "prose"}
"""Kits of the test run itself and of a script."""


def suite_of(file: Path) -> str:
    """unit/wire, contract/trainer, mesh: the folder of a suite."""
    parts = file.relative_to(TESTS).parts[:-1]
    return "/".join(parts[:2] if file.parts[len(TESTS.parts)] in ("unit", "contract") else parts[:1])


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^(\w+)(?:[.:]\w+)+$", node.value)  # an import path of a configuration


def test_the_map_lists_every_kit_once() -> None:
    named = re.findall(r"`([\w/]+)`(?=[^|\n]*\| )", README)
    beside = [
        file.relative_to(TESTS).with_suffix("").as_posix()
        for file in TESTS.rglob("*.py")
        if not file.name.startswith(("test_", "conftest", "make_golden"))
        and not {"support", *PROGRAMS_AND_DATA} & set(file.parts)
    ]
    assert sorted(named) == sorted([*(file.stem for file in SUPPORT.glob("*.py")), *beside])


def test_a_kit_for_all_is_used_by_several_suites() -> None:
    uses: dict[str, set[str]] = defaultdict(set)
    kits = {
        file.stem for file in SUPPORT.glob("*.py") if '__name__ == "__main__"' not in file.read_text()
    } - FOR_THE_RUN
    for file in TESTS.rglob("*.py"):
        suite = file.stem if file.parent == SUPPORT else suite_of(file)
        for name in kits.intersection(imports_of(file)) - {file.stem}:
            uses[name].add(suite)
    alone = {name: sorted(uses[name]) for name in kits if len(uses[name]) < 2}
    assert not alone, f"move a kit beside the only suite that uses it: {alone}"
