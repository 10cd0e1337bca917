"""A real hub behind a real gRPC server, real clients over loopback, and engines that hold their weights in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from local_ports import free_port
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.credentials import Credentials
from meshrl.core.config.shared import ServerConfig, WeightBroadcastConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.inference.adapters import AdapterTable
from meshrl.inference.agent.agent import Membership, WeightAgent
from meshrl.inference.agent.ahead import VersionAhead
from meshrl.inference.engine import CollectiveSupport, Engine, FinishReason, GenerateRequest, HostVersion, TokenChunk
from meshrl.inference.sleep import Sleeper
from meshrl.versions.placement import PlacementTracer, check_parts
from meshrl.weights.config import WeightsConfig
from meshrl.weights.hub import Hub
from meshrl.weights.main import build_hub
from meshrl.weights.raw_server import RawServer
from meshrl.weights.service import WeightSyncService
from meshrl.wire import frames
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import digest, root_of
from meshrl.wire.types import Activation, Manifest, Transport, VersionSpan
from polling import until
from state_publisher import StatePublisher


def make_state(seed: int, *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A small model's weights; 11 chunks of 4096 bytes, none aligned with tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed.weight": (97, 33), "model.layers.0.mlp.weight": (61, 127), "model.norm.weight": (33,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class MemoryEngine:
    """The Engine protocol over a dict of tensors: everything real but the language model."""

    runs = Engine.runs

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.live = {name: tensor.clone() for name, tensor in state.items()}
        self.version: int | None = None
        self.root: bytes | None = None
        self.paused = False
        self.unfit: str | None = None
        self.in_flight = 3
        self.stages_from_files = self.patches = self.receives_deltas = False
        self.collective: CollectiveSupport | None = None
        self.adapters: AdapterTable[dict[str, torch.Tensor]] | None = None
        self.shadow: tuple[int, dict[str, torch.Tensor]] | None = None
        self.fail_apply = False
        self.history: list[str] = []
        self.before_stage: Callable[[], Awaitable[None]] | None = None
        self.before_apply: Callable[[], Awaitable[None]] | None = None
        self.can_sleep = False
        self.before_sleep: Callable[[], Awaitable[None]] | None = None
        self.sleeper = Sleeper(self._fall_asleep, self._wake_up, busy=lambda: self.in_flight > 0, deadline_s=3.0)

    @property
    def sleeping(self) -> bool:
        return self.sleeper.sleeping

    async def sleep(self) -> bool:
        return await self.sleeper.sleep()

    async def wake(self) -> None:
        await self.sleeper.wake()

    async def _fall_asleep(self) -> None:
        if self.before_sleep is not None:
            await self.before_sleep()
        self.history.append("sleep")

    async def _wake_up(self) -> None:
        self.history.append("wake")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self.unfit is not None:
            raise MeshError(Reason.ENGINE_FAILED, self.unfit)
        self.in_flight += 1
        try:
            await self.wake()
        finally:
            self.in_flight -= 1
        yield TokenChunk(
            start=0,
            token_ids=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            version_spans=(VersionSpan(start=0, end=1, version=self.version or 0),),
            finish_reason=FinishReason.LENGTH,
        )

    async def pause(self) -> int:
        self.history.append("pause")
        self.paused = True
        return self.in_flight

    async def resume(self) -> None:
        self.history.append("resume")
        self.paused = False

    async def stage(self, host: HostVersion) -> None:
        if self.before_stage is not None:
            await self.before_stage()
        self.shadow = (host.version, {name: tensor.clone() for name, tensor in host.tensors.items()})
        self.history.append(f"stage {host.version}")

    async def patch(self, manifest: Manifest, delta: Path, *, onto_staged: bool) -> None:
        assert not onto_staged or self.shadow is not None
        held = self.shadow[1] if onto_staged and self.shadow is not None else self.live
        made = {name: held[name].clone() for name in self.live}
        tracer = PlacementTracer({name: torch.empty_like(tensor) for name, tensor in made.items()})
        with tracer.sources(list(made.items())):
            for name, tensor in made.items():
                tracer.parameters[name].copy_(tensor)
        placement = tracer.placement()
        assert placement is not None
        placement.patch(manifest, np.fromfile(delta, dtype=np.uint8), made, 1)
        check_parts(manifest, [placement.digests(made)])
        self.shadow = (manifest.version, made)
        self.history.append(f"patch {manifest.version}")

    async def apply(self, version: int, root: bytes) -> None:
        assert self.paused
        assert self.shadow is not None
        assert self.shadow[0] == version
        if self.before_apply is not None:
            await self.before_apply()
        if self.fail_apply:
            self.fail_apply = False
            self.live["model.norm.weight"] = self.shadow[1]["model.norm.weight"]  # torn: one tensor of three
            self.unfit = "it broke in the middle"
            raise MeshError(Reason.ENGINE_FAILED, self.unfit)
        self.live, self.shadow, self.unfit = self.shadow[1], None, None
        self.version, self.root = version, root
        self.history.append(f"apply {version}")

    async def adopt(self, version: int, root: bytes) -> None:
        self.version, self.root = version, root
        self.history.append(f"adopt {version}")

    def layout(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        return tuple((n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in sorted(self.live.items()))

    async def weights_root(self) -> bytes:
        return root_of(
            (name, dtype, shape, digest(self.live[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()))
            for name, dtype, shape in self.layout()
        )

    def holds(self, state: Mapping[str, torch.Tensor]) -> bool:
        return state.keys() == self.live.keys() and all(torch.equal(self.live[name], state[name]) for name in state)


class Mesh:
    """One hub at a fixed port that can be killed and restarted, and whoever talks to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, object] = {"lease_s": 6.0, "commit_deadline_s": 30.0}
        self.port = free_port()
        self.credentials: Credentials | None = None
        self.hub: Hub
        self.raw: RawServer
        self._server: GrpcServer | None = None
        self._clients: list[WeightSyncClient] = []
        self._agents: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    async def start_hub(self) -> None:
        server = ServerConfig(port=self.port)
        config = WeightsConfig(server=server, output_dir=self.folder, **self.settings)  # type: ignore[arg-type] # test keys
        self.hub = build_hub(config)
        await self.hub.start()
        self._server = GrpcServer(server, credentials=self.credentials)
        self.raw = RawServer(self.hub, "127.0.0.1", 0)
        self.raw.start()
        self._server.add(frames.SERVICE, frames.add_weight_sync, WeightSyncService(self.hub, raw=self.raw))
        self.port = await self._server.start()
        self._server.set_serving()

    async def kill_hub(self) -> None:
        """Ends the hub without a word to anyone: calls in flight break off."""
        assert self._server is not None
        await self.raw.stop()
        await self._server.drain(0.0)
        await self.hub.stop()
        self._server = None

    async def restart_hub(self) -> None:
        await self.kill_hub()
        await self.start_hub()

    def client(self, **more: Any) -> WeightSyncClient:
        options = ChannelOptions(**{"unary_deadline_s": 10.0, "retry_attempts": 2, "retry_backoff_s": 0.05, **more})
        client = WeightSyncClient(f"127.0.0.1:{self.port}", options)
        self._clients.append(client)
        return client

    def publisher(
        self, transport: Transport, *, epoch: int = 1, retry_for_s: float = 5.0, **more: Any
    ) -> StatePublisher:
        folder = self.folder / "broadcasts"
        return StatePublisher(
            self.client(), transport, folder, epoch=epoch, retry_for_s=retry_for_s, num_threads=3, **more
        )

    async def activate(self, version: int, *, prepare_deadline_s: float = 30.0, **more: Any) -> Activation:
        return await self.client().activate_version(
            run_id="run", version=version, prepare_deadline_s=prepare_deadline_s, **more
        )

    def start_agent(
        self,
        engine_id: str,
        engine: MemoryEngine,
        spool_dir: Path | None = None,
        ahead: VersionAhead | None = None,
        stall_s: float = 20.0,
    ) -> WeightAgent:
        agent = WeightAgent(
            self.client(),
            engine,
            Membership(engine_id=engine_id, broadcast=WeightBroadcastConfig(stall_s=stall_s)),
            "127.0.0.1:8000",
            spool_dir=spool_dir,
            ahead=ahead,
        )
        stop = asyncio.Event()
        self._agents[engine_id] = (asyncio.create_task(agent.run(stop)), stop)
        return agent

    async def kill_agent(self, engine_id: str) -> None:
        """Cuts an agent off in the middle of whatever it does, and has its lease be over."""
        task, _ = self._agents.pop(engine_id)
        task.cancel()
        await asyncio.wait({task})
        lost = self.hub.coordinator.pool.engines[engine_id]
        await until(lambda: not lost.connected)  # nothing of it is on its way any more
        lost.seen_s -= self.hub.coordinator.pool.lease_s

    async def until(self, holds: Callable[[], bool], deadline_s: float = 60.0) -> None:
        await until(holds, deadline_s)

    async def until_registered(self, count: int = 1) -> None:
        await self.until(lambda: sum(e.connected for e in self.hub.coordinator.pool.engines.values()) >= count)

    async def close(self) -> None:
        for task, stop in self._agents.values():
            stop.set()
            await asyncio.wait({task}, timeout=60.0)
        for client in self._clients:
            await client.close()
        if self._server is not None:
            await self.kill_hub()
