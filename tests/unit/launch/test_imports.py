"""What `rl` imports before its programs start, which they wait for."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("meshrl.launch.main", {"meshrl.orchestrator.build", "torch"}),
        ("meshrl.launch.preflight.plugins", {"meshrl.launch.compose"}),
    ],
)
def test_a_start_is_spared_the_import_of_what_only_others_need(module: str, spared: set[str]) -> None:
    code = f"import sys, {module}; print({spared!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "set()\n"
