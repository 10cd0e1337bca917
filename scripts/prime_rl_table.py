"""Writes the tables of keys into docs/prime-rl-keys.md: `python scripts/prime_rl_table.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshrl.prime_rl.keys import KEYS, ForeignKey

PAGE = Path(__file__).parents[1] / "docs" / "prime-rl-keys.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->"
TWINS = ((".train.env.", ".eval.env.", ".{train,eval}.env."), ("trainer.", "sft.", "{trainer,sft}."))
"""Parts of a path by which two rows may differ alone, and how one row has both."""


def tables() -> str:
    """The tables in Markdown: keys that are moved, without effect, and refused."""
    keys = _folded(KEYS)
    moved, refused = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for key in keys:
        if key.new:
            moved[_place(key)].append(_written(key))
        elif not key.unused:
            refused[key.why].append(_written(key))
    unused = dict.fromkeys(_written(key) for key in keys if not key.new and key.unused)
    return "\n".join(
        [
            "## Taken under another name\n", *_table(("prime-rl", "here"), moved),
            "\n## Taken without effect\n", f"The notes give the reasons: {', '.join(unused)}.",
            "\n## Refused\n", *_table(("prime-rl", "in its place"), refused),
        ]
    ) + "\n"  # fmt: skip


def _table(head: tuple[str, str], rows: Mapping[str, Sequence[str]]) -> Iterable[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    yield from (f"| {', '.join(dict.fromkeys(keys))} | {place} |" for place, keys in rows.items())


def _folded(keys: Iterable[ForeignKey]) -> list[ForeignKey]:
    """With one row for each pair of twins, in the place of the first."""
    found = list(keys)
    for one, other, both in TWINS:
        for key in [key for key in found if one in key.old]:
            twin, pair = (
                replace(key, **{name: getattr(key, name).replace(one, part, 1) for name in ("old", "new", "why")})
                for part in (other, both)
            )
            if twin != key and twin in found:
                found[found.index(key)] = pair
                found.remove(twin)
    return found


def _written(key: ForeignKey) -> str:
    section, _, name = key.old.rpartition(".sampling.")
    written = f"sampling.{name}" if section and not section.endswith(".algo") else key.old
    values = f" = {' or '.join(key.only)}" if key.only else ""
    return f"`{written}{values}`{' (program alone)' if key.alone else ''}"


def _place(key: ForeignKey) -> str:
    values = ", ".join(f"`{old}` is `{new}`" for old, new in key.values.items())
    if key.new == key.old:
        return values
    section, _, name = key.new.rpartition(".sampling.")
    place = f"`{name}` of the same section" if section else f"`{key.new}`"
    return f"{place}; {values}" if values else place


def with_tables(page: str) -> str:
    """The page with the present tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
