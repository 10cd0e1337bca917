"""Writes the contract for those who do not use buf: `python scripts/archive_contract.py [FOLDER]`.

FOLDER/meshrl-contract-VERSION.tar.gz has the protos, the vectors, docs/contract.md and a README. The same tree gives
the same bytes.
"""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from pathlib import Path

from meshrl.wire.types import CONTRACT_VERSION

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"


def files() -> dict[str, Path]:
    """Every file of the archive by its name there, sorted."""
    found = {path.name: path for path in (ROOT / "LICENSE", ROOT / "docs" / "contract.md", PROTO / "README.md")}
    for path in (*PROTO.rglob("*.proto"), *PROTO.glob("vectors/*.json")):
        found[path.relative_to(PROTO).as_posix()] = path
    return dict(sorted(found.items()))


def write(folder: Path) -> Path:
    """Makes the archive in a folder."""
    top = f"meshrl-contract-{CONTRACT_VERSION}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in files().items():
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"{top}/{name}")  # owned by nobody, of no date
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{top}.tar.gz"
    target.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return target


if __name__ == "__main__":
    sys.stdout.write(f"{write(Path(sys.argv[1] if len(sys.argv) > 1 else 'outputs'))}\n")
