"""Two runs on one machine at once: neither takes the other's ports, and each ends by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_run import Run

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


def ports(run: Run) -> set[str]:
    """Every port that the programs of a run listen on."""
    files = (run.output_dir / "configs").glob("*.toml")
    listening = [re.findall(r"^\[server\]\n(?:.+\n)*?port = (\d+)", path.read_text(), re.MULTILINE) for path in files]
    return {port for found in listening for port in found}


def test_runs_that_start_at_once_train_beside_each_other(start_run: Callable[..., Run], tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        run = start_run("--max-steps", "2", "--output-dir", str(tmp_path / name))
        run.output_dir = tmp_path / name
        runs.append(run)
    for run in runs:
        assert run.finish() == 0, run.log("rl")
        assert run.steps() == [1, 2]
    assert [len(ports(run)) for run in runs] == [4, 4]  # rollout, trainer, weights and inference
    assert not ports(runs[0]) & ports(runs[1])
    assert not [pid for run in runs for pid in run.left_running()]
