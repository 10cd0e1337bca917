"""clients/typescript with its example, built: its packages come from npm, once, and it runs from .tools."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "clients" / "typescript"
HOME = (ROOT / ".tools" / "typescript").resolve()  # npm refuses a folder that a link leads to
INSTALL_S = 240.0
BUILD_S = 120.0


def built() -> Path:
    """The package's folder, built as its script `build` does, once for the same sources; tests that run beside each
    other wait for the one that builds. Raises CalledProcessError with what npm says."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources, mark = _digest(), HOME / "built.txt"
        if not mark.exists() or mark.read_text() != sources:
            mark.unlink(missing_ok=True)
            _build()
            mark.write_text(sources)
    return HOME


def _digest() -> str:
    made = hashlib.sha256()
    for root in (SOURCE, ROOT / "proto"):
        for path in sorted(root.rglob("*")):
            if path.is_file() and not {"node_modules", "dist", "gen"} & set(path.relative_to(root).parts):
                made.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return made.hexdigest()


def _build() -> None:
    lock, mark = (SOURCE / "package-lock.json").read_text(), HOME / "installed.txt"
    for name in ("package.json", "package-lock.json", "tsconfig.json"):
        shutil.copy(SOURCE / name, HOME)
    for name in ("src", "examples", "test"):
        shutil.rmtree(HOME / name, ignore_errors=True)
        shutil.copytree(SOURCE / name, HOME / name, ignore=shutil.ignore_patterns("gen"))
    if not mark.exists() or mark.read_text() != lock:
        mark.unlink(missing_ok=True)
        command = ["npm", "ci", "--silent", "--no-audit", "--no-fund", "--prefix", str(HOME)]
        subprocess.run(command, check=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)
        mark.write_text(lock)
    tools = HOME / "node_modules" / ".bin"
    for command, folder in (
        (["buf", "generate", "--output", str(HOME)], SOURCE),
        (["tsc", "--incremental"], HOME),
        (["tsc", "--incremental", "--project", "examples"], HOME),
        (["tsc", "--incremental", "--project", "test"], HOME),
    ):
        subprocess.run(
            [tools / command[0], *command[1:]],
            check=True, timeout=BUILD_S, stdin=subprocess.DEVNULL, cwd=folder,
            env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        )  # fmt: skip


def command(*, port: int, hub: str) -> list[str]:
    """What starts its rollout service, which hosts reverse_text_ts."""
    return ["node", str(built() / "dist" / "examples" / "reverse_text" / "serve.js"), "--port", str(port), "--hub", hub]


def watch(trainer: str, *, count: int) -> list[str]:
    """What prints the steps of a run until `count` are done."""
    return ["node", str(HOME / "dist" / "bin" / "watch.js"), trainer, "--count", str(count)]


def check_vectors() -> subprocess.CompletedProcess[str]:
    """The package's own tests, which compute the vectors of proto/vectors."""
    env = {**os.environ, "MESHRL_VECTORS": str(ROOT / "proto" / "vectors")}
    command = ["node", "--test", str(built() / "dist" / "test" / "vectors.js")]
    return subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, env=env, check=False)
