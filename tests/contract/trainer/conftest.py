"""Fixtures of the tests of the trainer program: a tiny model and a real hub."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from trainer_kit import running_hub, save_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[str]:
    async with running_hub(tmp_path / "hub") as address:
        yield address
