"""The dataset: what is kept and why not, where reasoning goes, nothing twice, and parquet that `sft` reads alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.core.config import ConfigError
from meshrl.synthesize.dataset import ConversationDataset

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def rollout(number: int, reward: float = 1.0, **changes: Any) -> dict[str, Any]:
    said = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    return {
        "rollout_id": f"r{number}", "environment": "sums", "task": number, "task_key": "k", "agent": "",
        "reward": reward, "truncated": False, "conversations": [{"messages": said, "tools": [TOOL]}], **changes,
    }  # fmt: skip


def dataset(path: Path, **keys: Any) -> ConversationDataset:
    usual = {"model": "m", "min_reward": None, "keep_truncated": False, "reasoning_field": "reasoning_content"}
    return ConversationDataset(path, **{**usual, **keys})


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_has_messages_and_tools_and_says_where_it_is_from(tmp_path: Path) -> None:
    path = tmp_path / "dataset.jsonl"
    with dataset(path) as made:
        made.take([rollout(0)])
    (row,) = rows_of(path)
    assert row["messages"] == rollout(0)["conversations"][0]["messages"]
    assert json.loads(row["tools"]) == [TOOL]
    assert {name: row[name] for name in ("reward", "environment", "task", "model", "rollout_id")} == {
        "reward": 1.0, "environment": "sums", "task": 0, "model": "m", "rollout_id": "r0",
    }  # fmt: skip


def test_what_is_not_kept_is_counted_by_reason(tmp_path: Path) -> None:
    rollouts = [rollout(0, 0.4), rollout(1, 0.5), rollout(2, truncated=True), rollout(3, conversations=[])]
    with dataset(tmp_path / "dataset.jsonl", min_reward=0.5) as made:
        made.take(rollouts)
        assert (made.kept, dict(made.dropped)) == (1, {"reward": 1, "truncated": 1, "empty": 1})
    with dataset(tmp_path / "all.jsonl", keep_truncated=True) as made:
        made.take(rollouts)
        assert (made.kept, dict(made.dropped)) == (3, {"empty": 1})


def test_rows_are_appended_and_none_comes_twice(tmp_path: Path) -> None:
    path = tmp_path / "dataset.jsonl"
    path.write_text('{"messages": [], "note": "another hand wrote this"}\n')
    with dataset(path) as made:
        made.take([rollout(0), rollout(1)])
    with dataset(path) as made:
        made.take([rollout(1), rollout(2)])
        assert made.kept == 2
    assert [row.get("rollout_id") for row in rows_of(path)] == [None, "r0", "r1", "r2"]


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("reasoning", {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "I add."}),
        ("content", {"role": "assistant", "content": "<think>\nI add.\n</think>\n\n", "tool_calls": [CALL]}),
        (None, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
    ],
)
def test_reasoning_goes_where_it_is_wanted(tmp_path: Path, field: str | None, wanted: dict[str, Any]) -> None:
    with dataset(tmp_path / "dataset.jsonl", reasoning_field=field) as made:
        made.take([rollout(0)])
    assert rows_of(tmp_path / "dataset.jsonl")[0]["messages"][1] == wanted


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    with dataset(tmp_path / "dataset.jsonl") as made:
        without_tools = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
        made.take([rollout(0), rollout(1, conversations=without_tools)])
        path = made.write_parquet()
    assert path is not None
    first, second = pq.read_table(path).to_pylist()
    stored = rows_of(tmp_path / "dataset.jsonl")
    said = [{name: value for name, value in message.items() if value is not None} for message in first["messages"]]
    assert (said, first["tools"]) == (stored[0]["messages"], stored[0]["tools"])
    assert (second["tools"], second["rollout_id"]) == (None, "r1")


def test_rows_that_fit_no_table_leave_out_the_parquet_file_alone(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    parts = [{"type": "text", "text": "say abc"}]
    said = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "abc"}]}]
    with dataset(tmp_path / "d.jsonl") as made:
        made.take([rollout(0), rollout(1, conversations=said)])
        assert made.write_parquet() is None
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]
    assert rows_of(tmp_path / "d.jsonl")[1]["messages"][0]["content"] == parts


def test_a_file_that_is_no_dataset_is_let_go_of(tmp_path: Path) -> None:
    path = tmp_path / "dataset.jsonl"
    path.write_text("nonsense\n")
    for _ in range(2):  # a file that stays locked is called in use the second time
        with pytest.raises(ConfigError, match="line 1 of"):
            dataset(path).__enter__()
