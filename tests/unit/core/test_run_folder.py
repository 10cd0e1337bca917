"""Which folders --clean-output-dir empties, and which it refuses."""

from pathlib import Path

import pytest

from meshrl.core.config import ConfigError
from meshrl.core.run_folder import empty_folder, holds_a_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "trainer.log").write_text("x")
    (folder / "metrics.jsonl").write_text("{}")
    return folder


def test_folder_of_a_run_is_emptied(folder: Path) -> None:
    empty_folder(folder)
    assert list(folder.iterdir()) == []


def test_folder_with_the_configuration_of_a_run_is_emptied_whatever_else_it_holds(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "rl.toml").write_text("")
    (folder / "reward.png").write_text("")
    empty_folder(folder)
    assert list(folder.iterdir()) == []


def test_links_are_removed_and_what_they_point_to_stays(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "keep").write_text("x")
    (folder / "weights").symlink_to(data)
    empty_folder(folder)
    assert (data / "keep").exists()
    assert list(folder.iterdir()) == []


def test_folder_that_does_not_exist_is_fine(tmp_path: Path) -> None:
    empty_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_folder_of_something_else_is_refused(folder: Path) -> None:
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"does not look like the folder of a run \(it holds thesis.tex\)"):
        empty_folder(folder)
    assert (folder / "thesis.tex").exists()


@pytest.mark.parametrize("place", ["/", "~", "..", "."])
def test_folders_above_home_and_current_folder_are_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    with pytest.raises(ConfigError, match=r"it is or holds the (home|current) folder; choose another output_dir"):
        empty_folder(Path(place).expanduser())


def test_folder_that_holds_the_model_is_refused(folder: Path) -> None:
    model = folder / "weights" / "step_1"
    model.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"it holds .*, which the run begins with"):
        empty_folder(folder, keep=[model])
    assert model.exists()


def test_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ConfigError, match="it is no folder"):
        empty_folder(path)


def test_configurations_alone_are_no_run(folder: Path, tmp_path: Path) -> None:
    dry = tmp_path / "dry"
    (dry / "configs").mkdir(parents=True)
    assert [holds_a_run(place) for place in (folder, dry, tmp_path / "new")] == [True, False, False]
