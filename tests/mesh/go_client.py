"""clients/go, built, and checked against the contract's vectors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".tools" / "go"
BUILD_S = 300.0
TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
PACKAGES = (
    "google.golang.org/grpc", "google.golang.org/protobuf", "lukechampine.com/blake3", "github.com/klauspost/compress",
)  # fmt: skip


def why_not() -> str | None:
    """Why the client cannot be built here; None where it can."""
    gocode = Path("/usr/share/gocode/src")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    missing += [package for package in PACKAGES if not (gocode / package).is_dir()]
    if missing:
        return f"{', '.join(missing)} not installed: clients/go/README.md has the packages"
    return None


def built() -> str:
    """The program `meshrl-go`. Raises CalledProcessError with the compiler's or a vector's complaint on stderr."""
    subprocess.run([ROOT / "clients" / "go" / "build.sh", HOME], check=True, timeout=BUILD_S, stdin=subprocess.DEVNULL)
    return str(HOME / "bin" / "meshrl-go")
