"""The rows of a data section as conversations, all at once; `sft` reads them one by one."""

from __future__ import annotations

from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.conversations import Conversation, to_conversation
from meshrl.sft.data.sources import every_row, open_parts, row_name


def load_conversations(config: DataConfig) -> list[Conversation]:
    """Every row of the data. Raises DataError for data that is missing, malformed or empty."""
    parts = open_parts(config)
    names, rows = list(parts), list(parts.values())
    return [
        to_conversation(rows[part][row], row_name(rows[part], names[part], row, mixed=len(names) > 1))
        for part, row in every_row(parts)
    ]
