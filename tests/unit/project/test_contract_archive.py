"""The archive of the contract is complete and reproducible, and a stranger's compiler takes its protos."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from meshrl.wire.types import CONTRACT_VERSION

ROOT = Path(__file__).parents[3]
BUF = ROOT / ".tools/buf/node_modules/.bin/buf"
TOP = f"meshrl-contract-{CONTRACT_VERSION}"


def archive(folder: Path) -> Path:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "archive_contract.py", folder],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return Path(made.stdout.strip())


def test_the_archive_is_the_same_bytes_each_time_and_its_protos_compile_alone(tmp_path: Path) -> None:
    first, second = archive(tmp_path / "a"), archive(tmp_path / "b")
    assert first.name == second.name == f"{TOP}.tar.gz"
    os.utime(ROOT / "proto" / "README.md")  # dates of files are none of it
    assert first.read_bytes() == second.read_bytes() == archive(tmp_path / "c").read_bytes()
    with tarfile.open(first) as packed:
        packed.extractall(tmp_path, filter="data")
        names = {name.removeprefix(f"{TOP}/") for name in packed.getnames()}
    proto = ROOT / "proto"
    published = {path.relative_to(proto).as_posix() for path in proto.rglob("*.*") if path.suffix != ".binpb"}
    assert names == {*published, "LICENSE", "contract.md"}
    for name in published:
        assert (tmp_path / TOP / name).read_bytes() == (proto / name).read_bytes()
    subprocess.run([BUF, "build", tmp_path / TOP, "-o", "/dev/null"], check=True, timeout=60)
