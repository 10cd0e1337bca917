"""Fixtures of the tests of the trainer: its service alone, and what the whole program needs, a tiny model and a hub."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from served_trainer import Mesh, serving
from trainer_kit import running_hub, save_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[str]:
    async with running_hub(tmp_path / "hub") as address:
        yield address


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with serving(tmp_path) as mesh:
        yield mesh


@pytest.fixture
async def two_ranks(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with serving(tmp_path, dp_size=2) as mesh:
        yield mesh
