"""clients/typescript, built: its packages come from npm, once, and it runs from .tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "clients" / "typescript"
HOME = ROOT / ".tools" / "typescript"
INSTALL_S = 240.0
BUILD_S = 120.0


def built() -> Path:
    """The package's folder with its packages and what tsc made of it. Raises CalledProcessError with what npm says."""
    HOME.mkdir(parents=True, exist_ok=True)
    lock, mark = (SOURCE / "package-lock.json").read_text(), HOME / "installed.txt"
    for name in ("package.json", "package-lock.json", "tsconfig.json"):
        shutil.copy(SOURCE / name, HOME)
    shutil.rmtree(HOME / "src", ignore_errors=True)
    shutil.copytree(SOURCE / "src", HOME / "src")
    if not mark.exists() or mark.read_text() != lock:
        mark.unlink(missing_ok=True)
        command = ["npm", "ci", "--silent", "--no-audit", "--no-fund", "--prefix", str(HOME)]
        subprocess.run(command, check=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)
        mark.write_text(lock)
    tsc = [str(HOME / "node_modules" / ".bin" / "tsc"), "--project", str(HOME), "--incremental"]
    subprocess.run(tsc, check=True, timeout=BUILD_S, stdin=subprocess.DEVNULL)
    return HOME


def command(*, port: int, hub: str) -> list[str]:
    """What starts its rollout service, which hosts reverse_text_ts."""
    return ["node", str(built() / "dist" / "bin" / "serve.js"), "--port", str(port), "--hub", hub]


def watch(trainer: str, *, count: int) -> list[str]:
    """What prints the steps of a run until `count` are done."""
    return ["node", str(HOME / "dist" / "bin" / "watch.js"), trainer, "--count", str(count)]
