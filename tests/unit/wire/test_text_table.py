"""Columns of text for terminals and Markdown."""

from __future__ import annotations

from meshrl.wire.text_table import markdown_table, plain_table


def test_columns_are_as_wide_as_their_widest_cell_and_rows_may_end_early() -> None:
    rows = [("steps", 1200, "in all"), ("idle", None), ("a long name", "7", "of each")]
    assert plain_table(rows, right={1}, indent="  ").splitlines() == [
        "  steps        1200  in all",
        "  idle            -",
        "  a long name     7  of each",
    ]
    assert plain_table([("ID", "STATE"), ("r1", "")]) == "ID  STATE\nr1"


def test_the_first_row_heads_a_table_in_markdown() -> None:
    assert markdown_table([("name", "value"), ("a", None)]).splitlines() == [
        "| name | value |",
        "|------|-------|",
        "| a    | -     |",
    ]
