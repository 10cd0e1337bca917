"""Lines of files that another process appends to, from either end; a line that is not whole is never taken for one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.wire import growing_file
from meshrl.wire.growing_file import GrowingFile, json_records, lines_from_the_end, whole_size


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("growing") / "metrics.jsonl"


@given(lines=st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=9), data=st.data())
def test_both_ends_give_the_whole_lines_whatever_the_blocks(
    path: Path, lines: list[bytes], data: st.DataObject
) -> None:
    text = b"".join(line + b"\n" for line in lines)
    torn = data.draw(st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"")))
    path.write_bytes(text + torn)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_BLOCK_BYTES", "_READ_BYTES"):
            patch.setattr(growing_file, name, data.draw(st.integers(1, 12)))
        assert whole_size(path) == len(text)
        first = data.draw(st.integers(0, len(lines)))
        offset = sum(len(line) + 1 for line in lines[:first])
        assert list(lines_from_the_end(path, offset)) == lines[first:][::-1]
        assert list(GrowingFile(path, offset).read_on()) == lines[first:]


def test_a_file_is_read_on_and_from_its_beginning_once_it_is_begun_anew(path: Path) -> None:
    path.unlink(missing_ok=True)
    growing = GrowingFile(path)
    assert (list(growing.read_on()), list(lines_from_the_end(path)), whole_size(path)) == ([], [], 0)
    path.write_bytes(b"one\ntw")
    assert list(growing.read_on()) == [b"one"]
    path.write_bytes(b"one\ntwo\n")
    assert list(growing.read_on()) == [b"two"]
    assert not list(growing.read_on())
    path.write_bytes(b"new\n")
    assert growing.shrank()
    assert list(growing.read_on()) == [b"new"]
    path.unlink()
    assert not list(growing.read_on())
    path.write_bytes(b"longer than before\nhalf")
    assert list(growing.read_on()) == [b"longer than before"]


def test_lines_that_hold_no_record_are_left_out() -> None:
    assert list(json_records([b"", b'{"step": 1}', b"[1]", b'{"st', b"\xff", b'{"step": 2}'])) == [
        {"step": 1},
        {"step": 2},
    ]
