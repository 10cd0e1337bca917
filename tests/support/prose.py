"""The project's prose as sentences, and the phrases that no sentence may have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

RULES = {
    "speech": re.compile(r"\b(?:says?|said|saying|tells?|told|telling|hears?|heard|hearing)\b", re.IGNORECASE),
    "headless": re.compile(
        r"\b(?:who(?:m|se)?ever\b"
        r"|(?:what|which \w+) there (?:is|are|was|were)\b"
        r"|what\b[^.;:?,]{1,60}?\b(?:is|are|was|were|knows?|holds?|makes?|does|do|has|have|needs?|gives?) of\b)",
        re.IGNORECASE,
    ),
    "semicolons": re.compile(r";[^;]*;"),
}
"""Name of a rule to its phrase: things that speak, clauses without a noun, more than one semicolon in a sentence."""

QUOTED = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"\n]{1,200}\"|(?<!\w)'[^'\n]{1,100}'(?!\w)|https?://\S+")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'(*\[0-9]|\w+:)")
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*- |[^\n]*\S {2,}\S)")
"""Between the paragraphs, list entries and table rows of a docstring."""
NOT_OURS = frozenset({"v1", "node_modules", "build", ".venv"})
"""Folders of generated and of installed modules."""


@dataclass(frozen=True)
class Passage:
    """One paragraph, list entry, table cell or docstring, as it stands in a file."""

    path: Path
    line: int
    text: str

    def sentences(self) -> list[str]:
        """Its sentences, with blanks as single spaces, code spans and quoted text as `…`."""
        return SENTENCE_END.split(" ".join(QUOTED.sub("`…`", self.text).split()))


@dataclass(frozen=True)
class Fault:
    rule: str
    place: str
    sentence: str


def faults(passages: Iterable[Passage], root: Path) -> list[Fault]:
    """Every sentence that breaks a rule, once for each rule that it breaks."""
    return [
        Fault(rule, f"{passage.path.relative_to(root)}:{passage.line}", sentence)
        for passage in passages
        for sentence in passage.sentences()
        for rule, phrase in RULES.items()
        if phrase.search(sentence)
    ]


def pages(root: Path) -> list[Path]:
    """The pages that users and contributors read."""
    return [
        *(root / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
        *sorted((root / "docs").glob("*.md")),
    ]


def page(path: Path) -> Iterator[Passage]:
    """The prose of a Markdown page: no code blocks, comments or link targets; each cell of a table by itself."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", _blank, path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    start, lines = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if lines and (not line.strip() or re.match(r"\s*(?:[-*|#]|\d+\.) ?", line)):
            yield Passage(path, start, " ".join(lines))
            lines = []
        if line.startswith("|"):
            yield from (
                Passage(path, number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line) if cell.strip(" -")
            )
        elif line.strip():
            start = start if lines else number
            lines.append(line)


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def sources(root: Path) -> list[Path]:
    """Every hand-written module of the services, of the Python packages under clients/ and of the examples."""
    found = [path for tree in ("services", "clients", "configs") for path in sorted((root / tree).rglob("*.py"))]
    return [path for path in found if not NOT_OURS & set(path.relative_to(root).parts)]


def help_texts(root: Path) -> Iterator[Passage]:
    """The docstrings of configuration keys and of their sections, which --help prints."""
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and is_section(node):
                yield from _own_docstring(path, node)
                yield from _keys(path, node)


def is_section(node: ast.ClassDef) -> bool:
    """Whether the class is a section of configuration, by the name of its base."""
    return any(ast.unparse(base).endswith("Config") for base in node.bases)


def _keys(path: Path, section: ast.ClassDef) -> Iterator[Passage]:
    for node in section.body[1:]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Passage(path, node.lineno, node.value.value)


def docstrings(root: Path) -> Iterator[Passage]:
    """The docstrings of modules and of their public classes, functions and methods; sections of configuration apart."""
    for path in sources(root):
        yield from _docstrings(path, ast.parse(path.read_text()))


def _docstrings(path: Path, scope: ast.Module | ast.ClassDef) -> Iterator[Passage]:
    yield from _own_docstring(path, scope)
    for node in scope.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                if not is_section(node):
                    yield from _docstrings(path, node)
            else:
                yield from _own_docstring(path, node)


def _own_docstring(
    path: Path, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Passage]:
    text = ast.get_docstring(node) or ""
    for block in BLOCK.split(text):
        if block.strip():
            yield Passage(path, node.body[0].lineno, block)
