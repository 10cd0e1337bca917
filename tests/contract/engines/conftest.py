"""One running engine of each kind a session; every test of the contract runs against each."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from running_engine import EMBEDDED, VLLM, PlainModel, RunningEngine, make_models


@pytest.fixture(scope="session", params=[EMBEDDED, VLLM], ids=lambda kind: kind.name)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    kind = request.param
    if kind.missing:
        if os.environ.get("CI"):
            pytest.fail(kind.missing)
        pytest.skip(kind.missing)
    folder = tmp_path_factory.mktemp(kind.name)
    with RunningEngine(kind, folder / "run", make_models(folder / "models")) as running:
        yield running


@pytest.fixture(scope="session")
def plain(engine: RunningEngine) -> dict[str, PlainModel]:
    return {name: PlainModel(folder) for name, folder in engine.models.items()}


@pytest.fixture
async def http(engine: RunningEngine) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(engine.url, timeout=timeout) as session:
        yield session
