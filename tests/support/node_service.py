"""The rollout service in JavaScript of `node_rollouts`: its packages come from npm, once, and it runs from .tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "node_rollouts"
HOME = ROOT / ".tools" / "node_rollouts"
INSTALL_S = 240.0


def installed() -> Path:
    """The folder to run it from, with its packages. Raises CalledProcessError with what npm says."""
    HOME.mkdir(parents=True, exist_ok=True)
    wanted, found = (SOURCE / "package.json").read_text(), HOME / "package.json"
    if not (HOME / "node_modules").exists() or not found.exists() or found.read_text() != wanted:
        found.unlink(missing_ok=True)
        scratch = HOME / "install"
        scratch.mkdir(exist_ok=True)
        shutil.copy(SOURCE / "package.json", scratch)
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(scratch)],
            check=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        shutil.rmtree(HOME / "node_modules", ignore_errors=True)
        (scratch / "node_modules").rename(HOME / "node_modules")
    for file in SOURCE.iterdir():
        shutil.copy(file, HOME)
    return HOME


def command(*, port: int, hub: str) -> list[str]:
    """What starts it."""
    return ["node", str(installed() / "server.mjs"), "--port", str(port), "--hub", hub, "--proto", str(ROOT / "proto")]
