"""Runs against an engine that stays up: started without a hub, as `inference @ file`, and called by each run's hub."""

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
    process.kill()
    process.wait(60.0)


def version(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=60.0) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except OSError:
        return None


def test_two_runs_in_a_row_train_against_one_kept_engine(
    start_run: Callable[..., Run], kept_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINES_KEY", KEY)
    other = tmp_path / "other_model"
    create_model(other, seed=1)
    flags = (
        "--no-inference", "--max-steps", "2", "--orchestrator.logprob-check.fatal",
        "--orchestrator.client.base-url", f"{kept_engine}/v1", "--orchestrator.client.api-key-var", "ENGINES_KEY",
    )  # fmt: skip
    assert (version(kept_engine) or {})["hub"] is None
    served = []
    for name, more in (("one", ()), ("two", ("--model.name", str(other)))):
        run = start_run(*flags, *more, output_dir=tmp_path / name)
        assert run.finish(deadline_s=360.0) == 0, run.console.read_text()
        assert run.steps() == [1, 2]
        assert "started inference" not in run.log("rl")
        assert f"engine {kept_engine} follows this hub" in run.log("weights")
        answer = version(kept_engine) or {}
        served.append((answer["version"], answer["root"]))
        assert not run.left_running()
    assert "the engine waits for another" not in (tmp_path / "kept.txt").read_text()  # as if the first hub came back
    assert [number for number, _ in served] == [2, 2]
    assert served[0][1] != served[1][1]  # of two runs, though both are version 2; wrong ones would have ended the run
