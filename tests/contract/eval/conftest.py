"""A tiny model with checkpoints, and the real inference program in this process that serves it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider

from meshrl.inference.config import InferenceConfig
from meshrl.inference.program import serve
from meshrl.launch.ports import FreePorts
from meshrl.trials.program import Work, serve_trials
from meshrl.trials.results import TrialResults
from meshrl_examples.model import create_model

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, and the checkpoints step_1 and step_2 in `weights`."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "weights/step_1", "weights/step_2")):
        create_model(folder / name, seed=seed, **SIZES)
    return folder


@pytest.fixture
async def engine(models: Path, tmp_path: Path) -> AsyncIterator[str]:
    """URL of an engine that serves the base model."""
    torch.set_num_threads(1)
    stop = asyncio.Event()
    with FreePorts() as ports:
        port = ports("127.0.0.1")
        config = InferenceConfig(
            model={"name": str(models / "base")},
            server={"port": port},
            max_model_len=96,
            max_num_seqs=8,
            torch_threads=1,
            output_dir=tmp_path / "engine",
        )
        serving = asyncio.create_task(serve(config, stop, TracerProvider().get_tracer("test")))
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            stop.set()
            await asyncio.wait_for(serving, 60.0)


@pytest.fixture
def play() -> Callable[..., Any]:
    """Runs a command's work to its end: `await play(config, results, work)` gives the exit code."""

    async def run(config: Any, results: TrialResults, work: Work, stop: asyncio.Event | None = None) -> int:
        tracer = TracerProvider().get_tracer("test")
        return await serve_trials(config, stop or asyncio.Event(), tracer, results=results, work=work)

    return run


def lines_of(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:  # splitlines would split at U+2028 as well, which a model of random weights says
        return [json.loads(line) for line in file]


@pytest.fixture
def read() -> Callable[[Path], list[dict[str, Any]]]:
    return lines_of
