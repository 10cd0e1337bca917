"""Writes the table of keys into docs/prime-rl-keys.md: `python scripts/prime_rl_table.py`."""

from __future__ import annotations

from pathlib import Path

from meshrl.prime_rl.keys import KEYS, ForeignKey

PAGE = Path(__file__).parents[1] / "docs" / "prime-rl-keys.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


def table() -> str:
    """The table in Markdown; keys that go the same way share a row."""
    rows: dict[str, list[str]] = {}
    for key in KEYS:
        rows.setdefault(_now(key), []).append(_written(key))
    lines = [f"| {', '.join(dict.fromkeys(keys))} | {now} |" for now, keys in rows.items()]
    return "\n".join(["| prime-rl | here |", "|---|---|", *lines]) + "\n"


def _written(key: ForeignKey) -> str:
    section, _, name = key.old.rpartition(".sampling.")
    written = f"sampling.{name}" if section and not section.endswith(".algo") else key.old
    values = f" = {' or '.join(key.only)}" if key.only else ""
    return f"`{written}{values}`{' (program alone)' if key.alone else ''}"


def _now(key: ForeignKey) -> str:
    if key.values:
        values = ", ".join(f"`{old}` is `{new}`" for old, new in key.values.items())
        return f"values: {values}" if key.new == key.old else f"`{key.new}`; {values}"
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
