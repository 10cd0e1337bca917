"""The prose of the project is plain: things do not speak, clauses have nouns, a sentence has one semicolon at most."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import prose

ROOT = Path(__file__).parents[3]
ALLOWED: dict[str, str] = {}
"""A sentence that may break a rule, as `prose` shows it, to the reason."""


def pages(root: Path) -> Iterator[prose.Passage]:
    for path in prose.pages(root):
        yield from prose.page(path)


AREAS: dict[str, tuple[Callable[[Path], Iterator[prose.Passage]], int]] = {
    "docs": (pages, 0),
    "help": (prose.help_texts, 0),
    "docstrings": (prose.docstrings, 377),
}
"""Each area with the most faults that it may have: a ceiling is lowered when its area has fewer, and never raised."""


@pytest.mark.parametrize("area", AREAS)
def test_sentences_keep_the_rules(area: str) -> None:
    read, most = AREAS[area]
    found = [fault for fault in prose.faults(read(ROOT), ROOT) if fault.sentence not in ALLOWED]
    if len(found) < most:
        print(f"{area}: {len(found)} faults, and up to {most} are allowed: lower the ceiling")
    assert len(found) <= most, "\n".join(f"{fault.place} ({fault.rule}): {fault.sentence}" for fault in found)


def test_what_is_allowed_is_still_there() -> None:
    found = {fault.sentence for read, _ in AREAS.values() for fault in prose.faults(read(ROOT), ROOT)}
    assert ALLOWED.keys() <= found


@pytest.mark.parametrize(
    ("sentence", "rules"),
    [
        ("The log says which.", ["speech"]),
        ("It serves unless told otherwise.", ["speech"]),
        ("Whoever waits gets the result.", ["headless"]),
        ("It finishes what there is.", ["headless"]),
        ("What the hub knows of an engine is in the table.", ["headless"]),
        ("One thing; another; a third.", ["semicolons"]),
        ("One thing; another. A third; a fourth.", []),
        ('The line is `weights ended without saying so`, or "it said no".', []),
        ("The engine reports the versions that it holds.", []),
    ],
)
def test_rules_find_their_phrases(sentence: str, rules: list[str]) -> None:
    found = prose.faults([prose.Passage(ROOT / "README.md", 1, sentence)], ROOT)
    assert [fault.rule for fault in found] == rules


def test_a_page_is_read_without_its_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\nOne line\nand the next.\n\n```bash\necho says\n```\n\n- an entry\n  of two lines\n"
        "- [a link](says.md)\n\n| a cell | another |\n|---|---|\n"
    )
    assert [(passage.line, passage.text) for passage in prose.page(page)] == [
        (1, "# Title"),
        (3, "One line and the next."),
        (10, "- an entry   of two lines"),
        (12, "- [a link]"),
        (14, "a cell"),
        (14, "another"),
    ]
