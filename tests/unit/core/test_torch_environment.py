"""How OpenMP's threads are told to wait and torch's allocator to grow, and that torch is not loaded before."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.core.torch_environment import grow_segments, wait_briefly


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_what_the_environment_says_stays(given: dict[str, str], spins: str | None) -> None:
    environment = dict(given)
    wait_briefly(environment)
    assert environment.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_an_allocator_that_the_environment_names_stays(given: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(given)
    grow_segments(environment)
    assert environment == expected


@pytest.mark.parametrize("program", ["trainer", "inference"])
def test_a_program_says_so_before_it_loads_torch(program: str, tmp_path: Path) -> None:
    """OpenMP reads it once."""
    code = f"""
import os, sys
class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("spins:", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
from meshrl.{program}.main import main
main()
"""
    arguments = ["--server.port", "0"]
    ended = subprocess.run(
        [sys.executable, "-c", code, "--model.name", str(tmp_path), "--output-dir", str(tmp_path), *arguments],
        capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "spins: 1000" in ended.stdout, ended.stderr
