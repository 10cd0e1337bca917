"""Rows that are refused; `test_rows_table` has what is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conversations import load_conversations
from meshrl.sft.config import DataConfig
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.sources import open_parts

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., DataConfig]:
    def write_rows(*rows: Any) -> DataConfig:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return DataConfig(name=str(path))

    return write_rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, r"line 1 has columns \['text'\]; expected messages, or prompt and completion"),
        ({"prompt": "hi"}, "expected messages, or prompt and completion"),
        ({"messages": 3}, "line 1: messages must be a list of messages or a string, got int"),
        ({"messages": []}, "line 1: messages must be a list of messages or a string, got an empty list"),
        ({"messages": [{"content": "hi"}]}, "message 0 of messages: a message needs a role"),
        ({"messages": [USER], "tools": "{"}, "tools is a string but not JSON"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: expected an object with columns, got list"),
        ("", "holds no rows"),
    ],
)
def test_bad_rows_are_named(write: Any, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_conversations(write(row))


def test_a_byte_order_mark_before_a_list_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [{"prompt": "p", "completion": word} for word in ("a", "b")]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    (opened,) = open_parts(DataConfig(name=str(path))).values()
    assert [opened[index] for index in range(len(opened))] == rows


def test_a_file_of_another_kind_is_refused_by_its_ending(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(DataError, match=r"rows.csv': a file of rows is .jsonl, .json or .parquet; write it as one"):
        open_parts(DataConfig(name=str(tmp_path / "rows.csv")))


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet' holds no rows$"):
        open_parts(DataConfig(name=str(tmp_path / "rows.parquet")))


def test_a_broken_file_in_a_folder_is_refused_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n{"prompt": "p"')
    with pytest.raises(DataError, match="taken as a folder, split 'train': JSON parse error"):
        open_parts(DataConfig(name=str(tmp_path)))


@pytest.mark.parametrize("asked", [{"splits": ["train", "hard"]}, {"subset": "hard"}, {"subsets": ["easy", "hard"]}])
def test_one_file_is_not_mixed_with_itself(write: Any, asked: dict[str, Any]) -> None:
    config = write({"prompt": "p", "completion": "c"})
    with pytest.raises(DataError, match=r"rows.jsonl' has no subsets or splits to choose or to mix; name a folder"):
        open_parts(config.model_copy(update=asked))
    assert list(open_parts(config.model_copy(update={"split": "validation"}))) == ["validation"]
