"""Looks at the first rows of the data before a run loads its model, and shows them for `sft --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.sft.config import SFTConfig
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.loader import TokenizedRows
from meshrl.sft.data.mixture import Cursor, Draw

FIRST_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """What the first rows of one part of the data are like."""

    part: str
    rows: int
    tokens: int  # of the rows that were looked at, on average
    learned: float  # share of those tokens


def check_data(config: SFTConfig) -> list[DataCheck]:
    """Tokenizes the first rows of each part of the training and validation data.

    Raises DataError for data that is missing or malformed, and ModelError for a tokenizer, template or renderer that
    cannot be loaded.
    """
    sections = [config.data, *([config.val.data] if config.val is not None else [])]
    return [found for data in sections if data.type != "fake" for found in _checked(config, data)]


def _checked(config: SFTConfig, data: DataConfig) -> list[DataCheck]:
    rows = TokenizedRows(config, data)
    found: list[DataCheck] = []
    for part, (name, of_part) in enumerate(rows.parts.items()):
        samples = [
            rows.sample(Draw(cursor=Cursor(), part=part, row=row, passed=0.0)).sample
            for row in range(min(FIRST_ROWS, len(of_part)))
        ]
        tokens = sum(len(sample.token_ids) for sample in samples)
        learned = sum(int(sample.loss_mask.sum()) for sample in samples)
        found.append(
            DataCheck(
                part=name,
                rows=len(of_part),
                tokens=round(tokens / len(samples)),
                learned=learned / max(1, tokens),
            )
        )
    return found
