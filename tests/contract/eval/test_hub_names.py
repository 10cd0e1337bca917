"""Models and datasets by their names on the Hugging Face hub: the commands download them, use them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from datasets import Dataset
from meshrl.environments.reverse_text.demonstrations import demonstrations
from meshrl.environments.reverse_text.sentences import sentences

from hub_server import HubServer, serving_hub
from meshrl_examples.model import create_model

DEADLINE_S = 600.0
MODEL, DATA = "org/tiny", "org/tiny-data"

Run = Callable[..., Awaitable[str]]


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[HubServer]:
    """Serves a model with its tokenizer and a dataset in two parquet files."""
    create_model(tmp_path / "hub/models" / MODEL, seed=0, hidden_size=32, num_layers=1)
    rows = list(demonstrations(sentences("train")[:32], share=1.0, source=random.Random(0)))
    data = tmp_path / "hub/datasets" / DATA / "data"
    data.mkdir(parents=True)
    for index in range(2):
        Dataset.from_list(rows[16 * index :][:16]).to_parquet(data / f"train-{index:05}-of-00002.parquet")
    async with serving_hub(tmp_path / "hub") as served:
        yield served


@pytest.fixture
def run(hub: HubServer, tmp_path: Path) -> Run:
    async def command(script: str, *arguments: str) -> str:
        """What a command said that ended well, with that hub and empty caches of its own."""
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "OMP_NUM_THREADS": "1",
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name(script)), *arguments, cwd=tmp_path, env={**kept, **settings},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()
        return said.decode()

    return command


@pytest.mark.timeout(2 * DEADLINE_S)
async def test_a_model_and_a_dataset_are_named_as_on_the_hub(hub: HubServer, run: Run, tmp_path: Path) -> None:
    await run(
        "sft", "--model.name", MODEL, "--data.name", DATA, "--max-steps", "2", "--data.batch-size", "4",
        "--data.seq-len", "128", "--output-dir", "out", "--optim.lr", "1e-2",
    )  # fmt: skip
    first, second = [
        json.loads(line)["loss/mean"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    assert second < first
    fetched = {Path(each).name for each in hub.downloads}
    assert {"config.json", "model.safetensors", "tokenizer.json", "train-00001-of-00002.parquet"} <= fetched
    before = len(hub.downloads)
    await run(
        "eval", "--model.name", MODEL, "--inference", "--inference.max-model-len", "96",
        "--inference.engine", "embedded",
        "--environment-ids", "reverse_text", "--num-examples", "3",
        "--rollouts-per-example", "1", "--output-dir", "scores",
    )  # fmt: skip
    assert hub.downloads[before:] == []  # what sft has fetched is taken from the cache
    assert len((tmp_path / "scores/results.jsonl").read_text().splitlines()) == 3
