"""A hub that hangs up, stays silent or stops in the middle of a file: what loads by name ends in time and says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch

from hub_server import serving_hub
from meshrl.core import huggingface
from meshrl.core.config.shared import ModelConfig
from meshrl.models.load import ModelError, empty_model, fill_model
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.sources import open_parts
from meshrl_examples.model import create_model

NAME = "org/tiny"
DEADLINE_S = 60.0

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT says to a process that begins."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)


@asynccontextmanager
async def answering(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(DEADLINE_S):
        point_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", monkeypatch)
        yield


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.close()


async def keep_waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the client goes
    writer.close()


async def fill(tmp_path: Path) -> None:
    """Fetches the weights of a model whose shape is known."""
    create_model(tmp_path / "shape", seed=0, hidden_size=32, num_layers=1)
    here = ModelConfig(name=str(tmp_path / "shape"), device="cpu")
    model = empty_model(here, dtype=torch.float32).to_empty(device="cpu")
    model.tie_weights()
    await asyncio.to_thread(fill_model, model, here.model_copy(update={"name": NAME}))


async def test_weights_of_a_hub_that_hangs_up_or_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = r"^cannot download the weights of model\.name 'org/tiny': .*{}.*; check the name, the network, HF_TOKEN"
    async with answering(hang_up, monkeypatch):
        with pytest.raises(ModelError, match=refused.format("disconnected")):
            await fill(tmp_path)
    monkeypatch.setattr(huggingface, "ANSWER_S", 0.5)
    async with answering(keep_waiting, monkeypatch):
        with pytest.raises(ModelError, match=refused.format("timed out")):
            await fill(tmp_path)


async def test_rows_of_a_hub_that_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(hang_up, monkeypatch):
        with pytest.raises(DataError, match=r"^cannot load data\.name 'org/rows', taken as a name .*HF_ENDPOINT"):
            await asyncio.to_thread(open_parts, DataConfig(name="org/rows"))


async def test_weights_that_break_off_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_model(tmp_path / "hub/models" / NAME, seed=0, hidden_size=32, num_layers=1)
    async with serving_hub(tmp_path / "hub") as served, asyncio.timeout(DEADLINE_S):
        point_at(served.url, monkeypatch)
        served.cut = True
        with pytest.raises(ModelError, match=r"^cannot download the weights of model\.name 'org/tiny': .*HF_ENDPOINT"):
            await fill(tmp_path)
        served.cut = False
        await fill(tmp_path)
