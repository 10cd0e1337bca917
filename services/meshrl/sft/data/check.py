"""Looks at the first rows of the data before a run loads its model, and in `sft --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.sft.config import TextSettings
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.loader import TokenizedRows
from meshrl.sft.data.mixture import Cursor, Draw
from meshrl.sft.data.tokenization import shown

FIRST_ROWS = 8
SHOWN_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """The first rows of one part. `ways` lists how their learned text was found, `unused` the columns and message keys
    that nothing reads, which were logged."""

    part: str
    rows: int
    tokens: int  # of the rows that were looked at, on average
    learned: float  # share of those tokens
    ways: tuple[str, ...]
    unused: frozenset[str]
    shown: tuple[str, ...]  # rows as text with what is learned between [[ and ]]

    def lines(self) -> list[str]:
        return [
            f"{self.part}: {self.rows:,} rows; the first have {self.tokens:,} tokens on average, of which"
            f" {self.learned:.0%} are learned, found by {' and '.join(self.ways)}",
            *(f"{self.part}, row {number}: {text}" for number, text in enumerate(self.shown)),
        ]


def check_data(
    text: TextSettings, data: DataConfig, *, show: int = 0, validated: DataConfig | None = None
) -> list[DataCheck]:
    """Tokenizes the first rows of each part; shows so many of the training data. Raises DataError, and ModelError for
    a tokenizer, template or renderer that cannot be loaded."""
    found = _checked(text, data, show=show)
    return found + (_checked(text, validated, show=0) if validated is not None else [])


def _checked(text: TextSettings, data: DataConfig, *, show: int) -> list[DataCheck]:
    if data.type == "fake":
        return []
    rows = TokenizedRows(text, data)
    found: list[DataCheck] = []
    for part, (name, of_part) in enumerate(rows.parts.items()):
        samples = [
            rows.sample(Draw(cursor=Cursor(), part=part, row=row, passed=0.0)).sample
            for row in range(min(max(FIRST_ROWS, show), len(of_part)))
        ]
        tokens = sum(len(sample.token_ids) for sample in samples)
        learned = sum(int(sample.loss_mask.sum()) for sample in samples)
        found.append(
            DataCheck(
                part=name,
                rows=len(of_part),
                tokens=round(tokens / len(samples)),
                learned=learned / max(1, tokens),
                ways=tuple(rows.tokenize.ways),
                unused=frozenset(rows.unused),
                shown=tuple(_cut(shown(sample, rows.tokenize.tokenizer)) for sample in samples[:show]),
            )
        )
    return found


def _cut(text: str) -> str:
    left = len(text) - SHOWN_CHARACTERS
    return text if left <= 0 else f"{text[:SHOWN_CHARACTERS]} ... and {left:,} characters more"
