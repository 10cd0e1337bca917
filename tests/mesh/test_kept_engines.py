"""A run against an engine that stays up: started without a hub, as `inference @ file`, and called by the run's hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from local_ports import free_port
from mesh_run import Run
from meshrl_examples.model import create_model

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(900)]
UP_S = 240.0
KEY = "a-key-of-the-engines"


@pytest.fixture
def kept_engine(tmp_path: Path, model_dir: Path) -> Iterator[str]:
    """The URL of an engine that was started by hand, with a key and no word of any hub."""
    port = free_port()
    (tmp_path / "infer.toml").write_text(f"max_model_len = 128\ntorch_threads = 1\n[server]\nport = {port}\n")
    command = [
        sys.executable, "-m", "meshrl.inference.main", "@", str(tmp_path / "infer.toml"),
        "--model.name", str(model_dir), "--output-dir", str(tmp_path / "kept"),
    ]  # fmt: skip
    with (tmp_path / "kept.txt").open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "MESHRL_API_KEY": KEY}
        )
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + UP_S
    while version(url) is None:
        assert process.poll() is None, (tmp_path / "kept.txt").read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    yield url
    assert process.poll() is None, (tmp_path / "kept.txt").read_text()
    process.terminate()  # killed, it would leave its folder in /dev/shm
    process.wait(60.0)


def version(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=60.0) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except OSError:
        return None


def test_a_run_trains_against_a_kept_engine_which_outlives_it(
    start_run: Callable[..., Run], kept_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds another model's weights, as after another run."""
    monkeypatch.setenv("ENGINES_KEY", KEY)
    other = tmp_path / "other_model"
    create_model(other, seed=1)
    assert (version(kept_engine) or {})["hub"] is None
    run = start_run(
        "--no-inference", "--max-steps", "2", "--orchestrator.logprob-check.fatal", "--model.name", str(other),
        "--orchestrator.client.base-url", f"{kept_engine}/v1", "--orchestrator.client.api-key-var", "ENGINES_KEY",
    )  # fmt: skip
    assert run.finish(deadline_s=360.0) == 0, run.console.read_text()
    assert run.steps() == [1, 2]
    assert "started inference" not in run.log("rl")
    assert f"engine {kept_engine} follows this hub" in run.log("weights")
    assert (version(kept_engine) or {})["version"] == 2  # wrong weights would have ended the run
    assert not run.left_running()
