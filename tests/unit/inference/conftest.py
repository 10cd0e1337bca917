"""Engines over copies of a tiny random model."""

import copy
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from group_senders import GroupSenders
from meshrl.inference.embedded import EmbeddedEngine

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no test folder on the path; the kit lives here

from inference_kit import EngineFactory, make_model


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """The reference: never given to an engine, which takes over what it gets."""
    return make_model()


@pytest.fixture
async def start_engine(model: PreTrainedModel) -> AsyncIterator[EngineFactory]:
    """Starts engines over copies of the model (or `weights`); closes them after the test."""
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def running(weights: PreTrainedModel | None, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
            engine = EmbeddedEngine(
                copy.deepcopy(model if weights is None else weights),
                **{"max_model_len": 96, "num_slots": 8, "seed": 1, **settings},
            )
            engine.start()
            yield engine
            await engine.close()

        async def start(weights: PreTrainedModel | None = None, **settings: Any) -> EmbeddedEngine:
            return await stack.enter_async_context(running(weights, **settings))

        yield start


@pytest.fixture
async def new_senders() -> AsyncIterator[Callable[..., GroupSenders]]:
    """Makes trainers' ends of groups; they die with the test."""
    made: list[GroupSenders] = []

    def make(**settings: Any) -> GroupSenders:
        made.append(GroupSenders(**settings))
        return made[-1]

    yield make
    for senders in made:
        senders.die()
