"""Engines over copies of a tiny random model, and HTTP servers over them."""

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from transformers import PreTrainedModel

from group_senders import GroupSenders
from inference_kit import ClientOf, EngineFactory, Start, make_model, make_tokenizer
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.http.app import InferenceServer
from meshrl.inference.http.tokenizer import TextCodec


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
async def client_of() -> AsyncIterator[ClientOf]:
    """Serves applications; gives a client of each, closed after the test."""
    async with AsyncExitStack() as stack:

        async def start(app: web.Application) -> TestClient:
            return await stack.enter_async_context(TestClient(TestServer(app)))

        yield start


@pytest.fixture
def serve(start_engine: EngineFactory, client_of: ClientOf) -> Start:
    """Starts HTTP servers over an engine, by default a new one; gives a client of each."""

    async def start(
        engine: EmbeddedEngine | None = None, codec: TextCodec | None = None, **settings: Any
    ) -> TestClient:
        engine = engine or await start_engine(eos_token_ids=(0,))
        codec = codec or TextCodec(make_tokenizer())
        return await client_of(InferenceServer(engine, model_name="tiny", codec=codec, **settings).app())

    return start


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
