"""An embedded engine with its agent, in this process, for tests of what a trainer publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.credentials import Credentials
from meshrl.core.config.shared import ModelConfig, WeightBroadcastConfig
from meshrl.inference.agent.agent import Membership, WeightAgent
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.models.load import load_model
from meshrl.models.state import hf_state
from meshrl.trainer.publishing.transport_choice import known_engines
from meshrl.wire.types import Activation, Manifest


@dataclass
class ServedEngine:
    """One engine; `kill` cuts its agent off in the middle of whatever it does."""

    engine: EmbeddedEngine
    model: torch.nn.Module
    task: asyncio.Task[None]

    def differs_from(self, folder: Path) -> list[str]:
        """Names of the live tensors that are not those of a weights folder, to the bit."""
        stored, live = hf_state(load_model(ModelConfig(name=str(folder), device="cpu"))), hf_state(self.model)
        assert stored.keys() == live.keys()
        return [name for name, tensor in live.items() if not torch.equal(tensor, stored[name])]

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        await self.engine.leave_group()


async def _known(client: WeightSyncClient, engine_id: str) -> None:
    """Waits until the hub knows the engine."""
    async with asyncio.timeout(60):
        while engine_id not in {known.engine_id for known in await known_engines(client)}:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving_engine(
    model: str,
    hub: str,
    engine_id: str = "e0",
    kind: type[EmbeddedEngine] = EmbeddedEngine,
    *,
    credentials: Credentials | None = None,
    relays: Sequence[str] = (),
) -> AsyncIterator[ServedEngine]:
    """Yields an engine that the hub knows; with credentials of its own, which do not list engines, one that starts."""
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    engine = kind(
        loaded,
        max_model_len=64,
        num_slots=1,
        max_queue=2,
        kv_cache_bytes=2**20,
        eos_token_ids=(),
        seed=0,
        version=None,
    )
    engine.start()
    stop = asyncio.Event()
    options = ChannelOptions(retry_attempts=2, retry_backoff_s=0.05, credentials=credentials)
    broadcast = WeightBroadcastConfig(relays=list(relays), stall_s=5.0)
    membership = Membership(engine_id=engine_id, broadcast=broadcast)
    async with WeightSyncClient(hub, options) as client:
        agent = WeightAgent(client, engine, membership, "127.0.0.1:1")
        served = ServedEngine(engine, loaded, asyncio.create_task(agent.run(stop)))
        try:
            if credentials is None:
                await _known(client, engine_id)
            yield served
        finally:
            stop.set()
            await asyncio.wait({served.task}, timeout=60.0)
            await engine.close()


async def activate(
    hub: str, version: int, *, min_ready: int = 0, prepare_deadline_s: float = 20.0
) -> tuple[Activation, Manifest]:
    """Has `min_ready` engines (0: every one) serve a version."""
    async with WeightSyncClient(hub) as client:
        activation = await client.activate_version(
            run_id="main", version=version, min_ready=min_ready, prepare_deadline_s=prepare_deadline_s
        )
        return activation, (await client.get_manifest("main", version))[0]
