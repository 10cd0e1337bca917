"""Fixtures of whole runs: `rl` as a user starts it, small enough for two CPU cores, on a model made here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh_run import RUN_TOML, SLOW, WITH_WORKERS, Run, environ
from meshrl_examples.model import create_model
from other_user import plant


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    create_model(folder, seed=0)
    return folder


@contextmanager
def starting(folder: Path, model_dir: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs in `folder`, all with one output folder unless told otherwise, and ends those that are left."""
    runs: list[Run] = []

    def start(*flags: str, output_dir: Path = folder / "out", text: str = RUN_TOML) -> Run:
        config = folder / "run.toml"
        config.write_text(text)
        console = folder / f"console_{output_dir.name}.txt"
        command = [sys.executable, "-m", "meshrl.launch.main", "@", str(config), "--model.name", str(model_dir)]
        with console.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--output-dir", str(output_dir), *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environ(COLUMNS="200"),
            )
        runs.append(Run(process=process, output_dir=output_dir, console=console))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            try:
                run.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                run.process.kill()


@pytest.fixture
def start_run(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., Run]]:
    with starting(tmp_path, model_dir) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_run(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Callable[..., Run]]:
    """For runs that several tests of a file look at."""
    with starting(tmp_path_factory.mktemp("shared"), model_dir) as start:
        yield start


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A folder that others may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a run of a test that failed still writes


@pytest.fixture(scope="session")
def planted(place: Path) -> Iterator[list[Path]]:
    """Folders of another user, made before the run, with names that could be guessed."""
    folders = plant(place / "out") if os.geteuid() == 0 else []
    yield folders
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def live_run(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, place: Path, planted: list[Path]
) -> Iterator[Run]:
    """It has trained a step and has thousands left, two engines, metrics to scrape, and evaluations."""
    evaluation = ("--orchestrator.eval.interval", "2", "--orchestrator.eval.num-examples", "4")
    environment = ("--orchestrator.eval.env.0.id", "reverse_text", "--orchestrator.eval.env.0.name", "held_out")
    metrics = ("--log.metrics-port", "0", "--num-engines", "2", "--weights.transport", "filesystem")
    with starting(tmp_path_factory.mktemp("live"), model_dir) as start:
        flags = ("--max-steps", "5000", *metrics, *evaluation, *environment, *WITH_WORKERS, *SLOW)
        run = start(*flags, output_dir=place / "out")
        run.wait_for(lambda: len(run.steps()) >= 1)
        yield run
