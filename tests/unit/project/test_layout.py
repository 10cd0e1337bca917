"""Guards the shape of the project: one namespace in two source roots, and light programs stay light."""

import ast
import importlib
import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE_ROOTS = ("services", "clients/python")
MAX_MODULES = 16


@pytest.mark.parametrize("source_root", SOURCE_ROOTS)
def test_meshrl_is_a_namespace_package_in_both_source_roots(source_root: str) -> None:
    assert (ROOT / source_root / "meshrl").is_dir()
    assert not (ROOT / source_root / "meshrl" / "__init__.py").exists()


def modules() -> list[Path]:
    """Every module of the services and clients but the generated stubs."""
    found = [path for root in SOURCE_ROOTS for path in (ROOT / root / "meshrl").rglob("*.py")]
    found += [*(ROOT / "clients" / "conformance").rglob("*.py"), *(ROOT / "configs").rglob("*.py")]
    return [path for path in found if "v1" not in path.parts]


def test_no_public_class_name_occurs_twice() -> None:
    """A name has one meaning over the whole code base; docs/glossary.md lists them."""
    places: dict[str, list[str]] = {}
    for path in modules():
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


# Words of docs/glossary.md with one meaning, and the modules whose names and classes may have them.
ONE_MEANING = {
    "parent": "",
    "transfer": "",
    "epoch": "",
    "layout": "meshrl/versions/",
    "manifest": "meshrl/wire/",
    "session": "meshrl/(weights|inference/agent)/",
    "slot": "meshrl/inference/embedded/",
    "worker": "meshrl/(rollout|orchestrator/exchange|inference/vllm)/|meshrl_conformance/",  # vLLM's word for its ranks
}
OTHER_MEANINGS = {
    "ChatSession": "a session of verifiers' harness, from which it is derived",
    "Layout": "the folders of a run",
    "PackedLayout": "where the samples of a row lie",
    "RankWorker": "a rank of the trainer",
    "Session": "one agent's run at a rollout service",
    "SessionBook": "those of all agents",
    "SlotUse": "the places for rollouts, as its metrics name them",
    "worker": "a rank of the trainer",
}
"""Names that have such a word in another meaning; each goes with its next rename, and none comes."""


def test_words_with_one_meaning_are_in_no_other_names() -> None:
    """A word of the glossary means one thing in every name of a module or a class."""
    found = set()
    for path in modules():
        names = [path.stem, *re.findall(r"^class ([A-Za-z_]\w*)", path.read_text(), re.MULTILINE)]
        for name in names:
            for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name):
                places = ONE_MEANING.get(word.lower().removesuffix("s"))
                if places is not None and not (places and re.search(places, str(path))):
                    found.add(name)
    assert found - OTHER_MEANINGS.keys() == set()


def test_the_glossary_defines_the_words_with_one_meaning() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    defined = {word for row in re.findall(r"^\| (.+?) \|", glossary, re.MULTILINE) for word in row.split(", ")}
    assert {word for word, places in ONE_MEANING.items() if places} <= defined


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in modules() if path.name != "__init__.py")
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}


def scripts() -> dict[str, str]:
    read: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return read


def test_there_is_a_console_script_for_every_program() -> None:
    programs = {path.parent.name for path in (ROOT / "services" / "meshrl").glob("*/main.py")}
    assert {"rl" if program == "launch" else program for program in programs} == scripts().keys() - {"env-server"}


@pytest.mark.parametrize("script", scripts())
def test_every_console_script_calls_a_main_that_exists(script: str) -> None:
    """Nothing of the program is imported, which would take seconds: its module is found and read."""
    module, function = scripts()[script].split(":")
    (main,) = getattr(importlib.import_module(module), function).args
    found = importlib.util.find_spec(main)
    assert found is not None, main
    assert found.origin is not None, main
    mains = [
        node
        for node in ast.parse(Path(found.origin).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    assert len(mains) == 1, main
    assert not mains[0].args.posonlyargs + mains[0].args.args  # it is called without any


def test_the_readme_shows_the_two_commands_first() -> None:
    commands = re.findall(r"^make \w+", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]
