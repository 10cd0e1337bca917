"""`meshrl logs -f` goes on over logs that are removed and written anew."""

from pathlib import Path

from meshrl.cli.logs import _new_lines


def test_a_log_that_goes_while_it_is_followed_is_read_anew_when_it_is_back(tmp_path: Path) -> None:
    path, read = tmp_path / "trainer.log", dict[Path, int]()
    path.write_text("one\n")
    assert list(_new_lines(path, read)) == ["one"]
    path.unlink()
    assert list(_new_lines(path, read)) == []
    path.write_text("two, longer than before\nhalf")
    assert list(_new_lines(path, read)) == ["two, longer than before"]
