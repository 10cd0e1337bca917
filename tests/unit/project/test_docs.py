"""What the documents say of the code is so: links lead somewhere, drawn states are those of the tables."""

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import pytest

from meshrl.inference.agent import states as agent_states
from meshrl.weights.coordinator import states as version_states

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").rglob("README.md")),
]
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`((?:services|clients|proto|tests|configs|scripts)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_are_there(page: Path) -> None:
    text = page.read_text()
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [name for name in CODE.findall(text) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize(
    ("marker", "table"),
    [("version states", version_states.TRANSITIONS), ("agent states", agent_states.TRANSITIONS)],
)
def test_drawn_states_are_those_of_the_code(marker: str, table: Mapping[Enum, frozenset[Enum]]) -> None:
    text = (ROOT / "docs" / "weight-versions.md").read_text()
    drawn = re.search(rf"<!-- {marker} -->\n```\n(.*?)```", text, flags=re.DOTALL)
    assert drawn is not None
    lines = [line.split("->") for line in drawn[1].splitlines()]
    assert {source.strip(): targets.split() for source, targets in lines} == {
        state.name: sorted(target.name for target in targets) for state, targets in table.items()
    }


def test_every_page_is_reachable_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_the_walks_name_their_files_and_get_no_longer() -> None:
    text = (ROOT / "docs" / "walk.md").read_text()
    for walk, most in zip(text.split("\n## ")[1:], (50, 25), strict=True):
        files = set(re.findall(r"\]\(\.\./([^)]+\.py)\)", walk.partition("\n| what happens")[2]))
        assert f"\n{len(files)} files, with" in walk
        assert 20 <= len(files) <= most, "a reader has to walk further than before"
