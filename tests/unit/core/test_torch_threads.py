"""How OpenMP's threads are told to wait, and that torch is not loaded before."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.core.torch_threads import sleep_between_loops


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "1000"}, None)],
)
def test_what_the_environment_says_stays(given: dict[str, str], policy: str | None) -> None:
    environment = dict(given)
    sleep_between_loops(environment)
    assert environment.get("OMP_WAIT_POLICY") == policy


@pytest.mark.parametrize("program", ["trainer", "inference"])
def test_a_program_says_so_before_it_loads_torch(program: str, tmp_path: Path) -> None:
    """OpenMP reads it once."""
    code = f"""
import os, sys
class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("policy:", os.environ.get("OMP_WAIT_POLICY"), flush=True)
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
    assert "policy: PASSIVE" in ended.stdout, ended.stderr
