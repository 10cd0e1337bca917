"""The prose of the project is plain: things do not speak, clauses have nouns, a sentence has one semicolon at most."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import prose

ROOT = Path(__file__).parents[3]


def pages(root: Path) -> Iterator[prose.Passage]:
    for path in prose.pages(root):
        yield from prose.page(path)


@pytest.mark.parametrize("read", [pages, prose.help_texts, prose.docstrings], ids=["docs", "help", "docstrings"])
def test_sentences_keep_the_rules(read: Callable[[Path], Iterator[prose.Passage]]) -> None:
    passages = list(read(ROOT))
    assert len(passages) > 500
    found = prose.faults(passages, ROOT)
    assert found == [], "\n".join(f"{fault.place} ({fault.rule}): {fault.sentence}" for fault in found)


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


def test_a_docstring_is_read_by_paragraphs_and_rows(tmp_path: Path) -> None:
    module = tmp_path / "services" / "meshrl" / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        '"""First; second.\n\nconsumes   one; two\nproduces   three\n"""\n\n'
        'def _private() -> None:\n    """It says; so; much."""\n\n\n'
        'class KeysConfig(BaseConfig):\n    """Keys."""\n\n    key: int = 0\n    """It says."""\n'
    )
    read = [passage.text for passage in prose.docstrings(tmp_path)]
    assert read == ["First; second.", "consumes   one; two", "produces   three"]
    assert [(passage.line, passage.text) for passage in prose.help_texts(tmp_path)] == [(12, "Keys."), (15, "It says.")]
