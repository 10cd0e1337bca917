"""A mesh of three real gRPC servers on loopback whose rollouts, steps and versions follow a script."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry import trace

from local_ports import free_port
from meshrl.core.config.shared import ServicesConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.core.telemetry.monitor import JsonlSink, Monitor
from meshrl.core.telemetry.waits import Waits
from meshrl.orchestrator.build import build_loop
from meshrl.orchestrator.config import OrchestratorConfig, TrainEnvConfig, TrainEnvsConfig
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.ledger.writer import LedgerWriter
from meshrl.orchestrator.loop import RunLoop
from meshrl.orchestrator.peers.connect import connect, wait_for_services
from meshrl.orchestrator.work.recipes import build_recipes
from meshrl.wire.types import Batch
from scripted_services import RolloutServicer, Script, TrainerServicer, WeightsServicer, make_journal, start_server

Started = tuple[RunLoop, Journal]


@dataclass
class RunningMesh:
    script: Script
    services: ServicesConfig
    servers: dict[str, GrpcServer]
    trainer: TrainerServicer
    training: asyncio.Task[None]

    async def kill_trainer(self) -> None:
        self.training.cancel()
        await self.servers["trainer"].drain(grace_s=0.0)

    async def start_trainer(self, step: int) -> None:
        """Another process of the trainer, at the same address, from the checkpoint of `step`."""
        port = int(self.services.trainer.rpartition(":")[2])
        self.trainer = TrainerServicer(self.script, epoch=self.trainer.book.epoch + 1, step=step)
        self.servers["trainer"] = await start_server(self.trainer, port)
        self.training = asyncio.create_task(self.trainer.train())


@asynccontextmanager
async def serve(script: Script) -> AsyncIterator[RunningMesh]:
    trainer = TrainerServicer(script)
    servicers = {"rollout": RolloutServicer(script), "weights": WeightsServicer(script), "trainer": trainer}
    ports = {name: free_port() for name in servicers}
    servers = {name: await start_server(servicer, ports[name]) for name, servicer in servicers.items()}
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    training = asyncio.create_task(trainer.train())
    running = RunningMesh(
        script=script, services=ServicesConfig(**addresses), servers=servers, trainer=trainer, training=training
    )
    try:
        yield running
    finally:
        running.training.cancel()
        for server in servers.values():
            await server.drain(grace_s=0.0)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def batches(script: Script) -> list[Batch]:
    """What the trainer is given, in order."""
    seen: list[Batch] = []
    script.refuses = lambda batch: bool(seen.append(batch))
    return seen


@pytest.fixture
async def mesh(script: Script) -> AsyncIterator[RunningMesh]:
    async with serve(script) as running:
        yield running


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., OrchestratorConfig]:
    def make(services: ServicesConfig, **changes) -> OrchestratorConfig:
        values = {
            "train": TrainEnvsConfig(env=[TrainEnvConfig(id="echo")]),
            "batch_size": 8,
            "group_size": 4,
            "seq_len": 64,
            "max_steps": 4,
            "services": services,
            "output_dir": tmp_path,
            "deadlines": {"unreachable_s": 0.5},
        }
        return OrchestratorConfig.model_validate(values | changes)

    return make


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Started]]:
    """Runs the loop for a config against its services; yields the loop and its journal."""

    @asynccontextmanager
    async def start(config: OrchestratorConfig, writer: LedgerWriter | None = None) -> AsyncIterator[Started]:
        services = connect(
            config.services, unreachable_s=config.deadlines.unreachable_s, teachers=config.teacher_services
        )
        monitor = Monitor([JsonlSink(tmp_path / "metrics.jsonl")])
        try:
            met = await wait_for_services(config, services, Waits())
            journal = await asyncio.to_thread(make_journal, config, met.trainer, met.run, writer)
            try:
                tracer = trace.get_tracer("test")
                async with services.watching():
                    recipes = build_recipes(config.algos, config.advantage, seq_len=config.seq_len)
                    loop = build_loop(
                        config, services, met, recipes=recipes, journal=journal, monitor=monitor, tracer=tracer
                    )
                    yield loop, journal
            finally:
                await asyncio.to_thread(journal.close)
        finally:
            await services.close()
            monitor.close()

    return start
