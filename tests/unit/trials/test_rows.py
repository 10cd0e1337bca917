"""The file of results: what is written is there again, half of anything is not."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from meshrl.core.config import ConfigError
from meshrl.trials.rows import RowFile, whole_episodes


def row(number: int, rollouts_of_episode: int = 1) -> dict[str, object]:
    return {
        "checkpoint": "base", "environment": "a", "task": 0, "number": number,
        "rollouts_of_episode": rollouts_of_episode,
    }  # fmt: skip


def test_a_line_that_is_half_written_is_cut_off_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with RowFile(path) as rows:
        rows.append([row(0)])
        rows.append([row(1)])
    with path.open("a") as file:
        file.write('{"checkpoint": "ba')
    with RowFile(path) as rows:
        assert list(rows) == [row(0), row(1)]
        rows.append([row(2)])
        assert list(rows) == [row(0), row(1), row(2)]


def test_an_episode_counts_once_each_of_its_agents_has_a_line() -> None:
    rows = [row(0, 2), row(0, 2), row(1, 2), row(2)]
    assert whole_episodes(rows) == {("base", "a", 0, 0), ("base", "a", 0, 2)}


def test_a_second_process_is_told_that_the_file_is_in_use(tmp_path: Path) -> None:
    in_use = pytest.raises(ConfigError, match=r"results.jsonl is written by another process; wait for its end")
    with RowFile(tmp_path / "results.jsonl"), in_use:
        RowFile(tmp_path / "results.jsonl").__enter__()
    with RowFile(tmp_path / "results.jsonl") as rows:
        assert list(rows) == []


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"a": 1}\nnonsense\n')
    with RowFile(tmp_path / "results.jsonl") as rows, pytest.raises(ConfigError, match="line 2 of"):
        list(rows)


def test_a_file_that_cannot_be_read_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"

    def broken(path: Path, mode: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "open", broken)
        with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
            RowFile(path).__enter__()
    with RowFile(path) as rows:  # which a file that stayed locked would refuse
        assert list(rows) == []
