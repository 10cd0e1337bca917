"""Writes the table of older keys into docs/configuration.md: `python scripts/older_keys_table.py`."""

from __future__ import annotations

from pathlib import Path

from meshrl.core.config.older_keys import OLDER_KEYS, OlderKey

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- older keys -->\n", "<!-- end of older keys -->"


def table() -> str:
    """The table in Markdown; keys that go the same way share a row."""
    rows: dict[str, list[str]] = {}
    for key in OLDER_KEYS:
        rows.setdefault(_now(key), []).append(_written(key))
    lines = [f"| {', '.join(dict.fromkeys(keys))} | {now} |" for now, keys in rows.items()]
    return "\n".join(["| written elsewhere | here |", "|---|---|", *lines]) + "\n"


def _written(key: OlderKey) -> str:
    section, _, name = key.old.rpartition(".sampling.")
    written = f"sampling.{name}" if section else key.old
    values = f" = {' or '.join(key.only)}" if key.only else ""
    return f"`{written}{values}`{' (program alone)' if key.alone else ''}"


def _now(key: OlderKey) -> str:
    if key.values:
        return "values: " + ", ".join(f"`{old}` is `{new}`" for old, new in key.values.items())
    if key.new:
        section, _, name = key.new.rpartition(".sampling.")
        return f"`{name}` of the same section" if section else f"`{key.new}`"
    return f"{'not used' if key.unused else 'not there'}: {key.why}"


def with_table(page: str) -> str:
    """The page with the present table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
