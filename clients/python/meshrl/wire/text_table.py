"""Tables of text, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest


def plain_table(rows: Iterable[Sequence[object]], *, right: Collection[int] = (), indent: str = "") -> str:
    """Columns two blanks apart, those in `right` aligned at their right edge. None is a dash. Rows may end early."""
    return "\n".join(indent + "  ".join(cells).rstrip() for cells in _aligned(rows, right))


def markdown_table(rows: Iterable[Sequence[object]]) -> str:
    """Aligned in its source; the first row is its head."""
    head, *body = _aligned(rows)
    rule = "|" + "|".join("-" * (len(cell) + 2) for cell in head) + "|"
    return "\n".join([markdown_row(head), rule, *map(markdown_row, body)])


def markdown_row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _aligned(rows: Iterable[Sequence[object]], right: Collection[int] = ()) -> list[list[str]]:
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
    return [
        [cell.rjust(widths[at]) if at in right else cell.ljust(widths[at]) for at, cell in enumerate(row)]
        for row in texts
    ]
