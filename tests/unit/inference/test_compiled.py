"""The folder of what vLLM compiled: packed, and unpacked only where nothing in it can do harm; needs no vLLM."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from meshrl.inference import compiled
from meshrl.inference.compiled import ArchiveError, CompiledFolder

KEY = "a" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledFolder:
    return opened(tmp_path / "here", monkeypatch)


def opened(home: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledFolder:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "")  # what `open` sets is taken back after the test
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    made = CompiledFolder(KEY, home)
    made.open()
    return made


def archive(*members: tuple[str, bytes], change: Callable[[tarfile.TarInfo], object] = lambda _: None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            change(member)
            file.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return zstandard.compress(packed.getvalue())


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_all_that_compiles_keeps_its_files_in_the_folder(folder: CompiledFolder, tmp_path: Path) -> None:
    place = tmp_path / "here" / KEY
    assert os.environ["VLLM_CACHE_ROOT"] == str(place / "vllm")
    assert os.environ["TRITON_CACHE_DIR"] == str(place / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(place / "torchinductor")
    assert place.stat().st_mode & 0o077 == 0


def test_what_one_host_compiled_is_in_the_folder_of_another(
    folder: CompiledFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / KEY / "vllm" / "rank_0").mkdir(parents=True)
    (tmp_path / "here" / KEY / "vllm" / "rank_0" / "graph.py").write_bytes(b"def call(): ...")
    (tmp_path / "here" / KEY / "cubin").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "here" / KEY / "link").symlink_to("/etc/passwd")  # stays here
    packed = folder.pack()
    there = opened(tmp_path / "there", monkeypatch)
    assert there.is_empty
    there.unpack(packed)
    assert not there.is_empty
    assert files(tmp_path / "there" / KEY) == {
        "vllm/rank_0/graph.py": b"def call(): ...",
        "cubin": bytes(range(256)) * 1000,
    }
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [KEY]


@pytest.mark.parametrize(
    "content",
    [
        archive(("../outside", b"x")),
        archive(("good", b"x"), ("a/../../outside", b"x")),
        archive(("/tmp/meshrl-outside", b"x")),
        archive(("link", b""), change=lambda member: (setattr(member, "type", tarfile.SYMTYPE), member)[1]),
        archive(("link", b""), change=lambda member: (setattr(member, "type", tarfile.LNKTYPE), member)[1]),
        archive(("device", b""), change=lambda member: (setattr(member, "type", tarfile.CHRTYPE), member)[1]),
        archive(("good", b"x" * 100_000))[:-20],
        archive(("name", b"x"), change=lambda member: member.pax_headers.update(path="a\0b")),
        b"no archive at all",
        zstandard.compress(b"no tar file" * 1000),
    ],
    ids=["parent", "later", "absolute", "symlink", "hard link", "device", "cut off", "no name", "garbage", "no tar"],
)
def test_archive_that_could_do_harm_is_refused_and_nothing_is_written(
    folder: CompiledFolder, tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(ArchiveError):
        folder.unpack(content)
    assert folder.is_empty
    assert files(tmp_path) == {}
    assert not Path("/tmp/meshrl-outside").exists()


@pytest.mark.parametrize(("name", "most"), [("MOST_BYTES", 1_000_000), ("MOST_FILES", 2)])
def test_archive_that_grows_beyond_the_bounds_is_refused(
    folder: CompiledFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    bomb = archive(*((f"zeros-{number}", bytes(600_000)) for number in range(3)))
    assert len(bomb) < 10_000
    monkeypatch.setattr(compiled, name, most)
    with pytest.raises(ArchiveError, match="more than"):
        folder.unpack(bomb)
    assert files(tmp_path) == {}


def test_headers_that_would_fill_the_memory_are_refused(
    folder: CompiledFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = archive(("name", b"x"), change=lambda member: member.pax_headers.update(comment="x" * 5_000_000))
    assert len(bomb) < 10_000
    monkeypatch.setattr(compiled, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(compiled, "MOST_FILES", 10)
    with pytest.raises(ArchiveError, match="unpacks to more"):
        folder.unpack(bomb)
    assert files(tmp_path) == {}


def test_folder_that_an_engine_compiles_into_is_left_alone(folder: CompiledFolder, tmp_path: Path) -> None:
    (tmp_path / "here" / KEY / "graph.py").write_bytes(b"mine")
    with pytest.raises(OSError, match="not empty"):
        folder.unpack(archive(("graph.py", b"another's")))
    assert files(tmp_path / "here" / KEY) == {"graph.py": b"mine"}


def test_too_much_is_not_packed(folder: CompiledFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / KEY / "graph.py").write_bytes(bytes(2000))
    monkeypatch.setattr(compiled, "MOST_BYTES", 1000)
    with pytest.raises(ArchiveError, match="too much to share"):
        folder.pack()


def test_key_covers_what_decides_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def key(**facts: str) -> str:
        monkeypatch.setenv("VLLM_CACHE_ROOT", "")  # taken back after the test
        monkeypatch.delenv("VLLM_CACHE_ROOT")
        folder = compiled.folder_of(facts)
        assert folder is not None
        return folder.key

    facts = {"gpu": "H100", "engine": "1234567890"}
    assert key(**facts) == key(**facts)
    assert len({key(**facts), key(**facts | {"gpu": "H200"}), key(**facts | {"engine": "1"})}) == 3
    before = key(**facts)
    monkeypatch.setattr(compiled.metadata, "version", lambda name: "99.0")
    assert key(**facts) != before
    assert len(list((tmp_path / "meshrl" / "compiled").iterdir())) == 4


def test_engine_starts_without_a_folder_where_none_can_be_had(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert compiled.folder_of({}) is None
    assert said == ["what is compiled is not kept for the next start: Could not determine home directory."]
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    assert compiled.folder_of({}) is None
