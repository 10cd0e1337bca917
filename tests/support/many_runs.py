"""A trainer of several runs without a hub: real learner, loop, commands and host; versions go into a table.

    torchrun many_runs.py MODEL FOLDER RESULT '{"runs": [["small", ...], ...], "steps": 4, "joined": [0], "lost": 2}'

As a program it trains each list of runs on the ranks of torchrun, those at the `joined` places in shared passes. The
optimizer of the one at `lost` fails on all ranks but rank 0, which writes what they became into RESULT.0 and so on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from opentelemetry import trace
from safetensors.torch import save_file

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.core.telemetry.waits import Waits
from meshrl.models.lora import adapter_state
from meshrl.trainer.loop import Joining, TrainerLoop
from meshrl.trainer.objectives import build_objective
from meshrl.trainer.publishing.publisher import PublishReport
from meshrl.trainer.ranks.commands import CommandSender
from meshrl.trainer.ranks.rank_runs import RankRun, RunMaker
from meshrl.trainer.ranks.worker import RankWorker
from meshrl.trainer.run_training import RunTraining, RunVersions
from meshrl.trainer.runs.hooks import RunHooks
from meshrl.trainer.runs.host import RunHost
from meshrl.trainer.runs.settings import RunSettings
from meshrl.trainer.runs.steps import StepBook, TrainingQueue
from meshrl.trainer.runs.table import RunTable
from meshrl.training.build import build_learner
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.learner import Learner
from meshrl.training.model_config import LoraConfig, TrainerModelConfig
from meshrl.training.optim import Optimizer
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.versions.progress import Progress
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, StepState

DEADLINE_S = 120.0
VOCAB, SEQ_LEN = 48, 32
JOINING = Joining(below=SEQ_LEN + 1, room=4 * SEQ_LEN)
OWN = LoraConfig(rank=8, alpha=16.0)

RUNS: Mapping[str, Mapping[str, Any]] = {
    "small": {"lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}},
    "wide": {"lora": {"rank": 32, "alpha": 32.0}, "seed": 5, "adapter_seed": 5},
    "odd": {"lora": {"rank": 5, "alpha": 7.0, "target_modules": ["down_proj"]}, "loss": {"type": "aipo"}},
    "dropped": {"lora": {"rank": 8, "alpha": 16.0, "dropout": 0.3}, "seed": 7},
    "grpo": {"lora": {"rank": 16, "alpha": 8.0}, "loss": {"type": "grpo"}, "optim": {"lr": 3e-3, "max_norm": None}},
    "sgd": {"lora": {"rank": 12, "alpha": 24.0}, "optim": {"type": "sgd", "lr": 1e-2}, "share": 2.0},
    "muon": {"lora": {"rank": 8, "alpha": 8.0}, "optim": {"type": "muon", "lr": 1e-3}, "share": 0.5},
    "cosine": {
        "lora": {"rank": 6, "alpha": 6.0, "dropout": 0.1, "target_modules": ["o_proj", "up_proj"]},
        "scheduler": {"type": "cosine", "warmup_steps": 2},
        "max_steps": 40,
    },
}
"""Runs of mixed ranks, layers, losses, optimizers, seeds, shares and dropout."""


def settings(name: str) -> RunSettings:
    return RunSettings.model_validate({"optim": {"lr": 1e-3}, **RUNS.get(name, {"lora": OWN.model_dump()})})


def batch(run_id: str, step: int, *, dp_size: int = 1, advantage: float | None = None) -> Batch:
    """The batch of a step of a run: the same whenever it comes."""
    source = np.random.default_rng([zlib.crc32(run_id.encode()), step])
    samples = [
        TrainSample(
            token_ids=source.integers(0, VOCAB, length).astype(np.int32),
            loss_mask=np.arange(length) >= 2,
            logprobs=(source.normal(scale=0.3, size=length) - np.log(VOCAB)).astype(np.float32),
            advantage=float(source.normal()) if advantage is None else advantage,
        )
        for length in source.integers(6, 24, 5)
    ]
    packing = pack_samples(samples, seq_len=SEQ_LEN, dp_size=dp_size)
    return Batch(
        run_id=run_id,
        step=step,
        micro_batches=packing.micro_batches,
        loss_tokens=packing.loss_tokens,
        environments=("env",),
    )


def load(model: str, parallel: RankGroup | None = None) -> Learner:
    config = TrainerModelConfig(name=model, device="cpu", ac=None, compile=None, lora=OWN, reshard_after_forward=True)
    return build_learner(config, parallel=parallel or RankGroup(), seed=3)


def own_run(learner: Learner, output_dir: Path) -> RankRun:
    own = settings("main")
    state = learner.new_run(
        objective=build_objective(own.loss),
        optim=own.optim,
        scheduler=own.scheduler,
        max_steps=None,
    )
    checkpointer = Checkpointer(learner, state, output_dir, tokenizer=None, adapters_of="base", merges=False)
    return RankRun(state=state, checkpointer=checkpointer)


class Publishing:
    """Takes a run's versions. `refuse` gives an error for a version; those in `held` wait for `release`."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.waiting: dict[str, Future[Any]] = {}
        self.refuse: Callable[[str, int], MeshError | None] = lambda run_id, version: None
        self.firsts: list[str] = []
        self.retired: list[str] = []
        self.closed = False

    def publish(self, run_id: str, version: int, captured: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if run_id in self.held:
            self.waiting[run_id] = done
            return done
        if (error := self.refuse(run_id, version)) is not None:
            done.set_exception(error)
        else:
            done.set_result(PublishReport(version=version, artifact_id="", root=b"", num_bytes=0))
        return done

    def release(self, run_id: str) -> None:
        self.held.discard(run_id)
        if run_id in self.waiting:
            self.waiting.pop(run_id).set_result(PublishReport(version=0, artifact_id="", root=b"", num_bytes=0))


class Opened:
    """A run that is open, as trainer.opening.OpenRun without a hub."""

    def __init__(self, training: RunTraining, publishing: Publishing) -> None:
        self.training, self._publishing, self._run_id = training, publishing, training.state.run_id

    async def first(self) -> None:
        self._publishing.firsts.append(self._run_id)

    async def retire(self) -> None:
        self._publishing.retired.append(self._run_id)

    async def close(self) -> None:
        pass


class ManyRuns:
    """A trainer with its own run and a host for others."""

    def __init__(
        self,
        learner: Learner,
        output_dir: Path,
        *,
        max_runs: int,
        room_bytes: int | None,
        stall_s: float,
        hooks: RunHooks | None,
        joining: Joining | None,
    ) -> None:
        self.learner, self.output_dir = learner, output_dir
        self.publishing, self.stall_s = Publishing(), stall_s
        self.commands = CommandSender(learner.parallel)
        self.own = own_run(learner, output_dir)
        self.table = RunTable(StepBook(run_id="main", epoch=1))
        self.trainings: dict[str, RunTraining] = {}
        self.waits = Waits()
        own = self._training(self.own, self.table.own, settings("main"), own=True)
        self.loop = TrainerLoop(
            self.table, own, self.commands, quantum_tokens=SEQ_LEN * learner.parallel.plan.dp_size,
            joining=joining, waits=self.waits, on_end=learner.parallel.barrier,
        )  # fmt: skip
        self.host = RunHost(
            self.table,
            self.loop,
            RunMaker(learner, output_dir, base_name="base", hooks=hooks),
            self.commands,
            self.own,
            settings("main"),
            max_runs=max_runs,
            room_bytes=room_bytes,
            history_events=1000,
            open_run=self._open,
        )
        self.turns: list[tuple[str, int, frozenset[str]]] = []
        """Each turn: its run, tokens, and the runs that could have had it."""
        scheduler, ready = self.loop.scheduler, frozenset[str]()
        next_run, charge = scheduler.next_run, scheduler.charge

        def note_ready(slices: Mapping[str, int]) -> str | None:
            nonlocal ready
            ready = frozenset(slices)
            return next_run(slices)

        def note_turn(run_id: str, tokens: int) -> None:
            self.turns.append((run_id, tokens, ready))
            charge(run_id, tokens)

        scheduler.next_run, scheduler.charge = note_ready, note_turn  # type: ignore[method-assign]
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at whatever ended the thread
            self.error = error

    def _open(self, run: RankRun, queue: TrainingQueue, of: RunSettings, epoch: int) -> Opened:
        if self.publishing.closed:
            raise MeshError(Reason.UNREACHABLE, "no hub")
        return Opened(self._training(run, queue, of, own=False), self.publishing)

    def _training(self, run: RankRun, queue: TrainingQueue, of: RunSettings, *, own: bool) -> RunTraining:
        run_id = run.state.run_id
        made = self.trainings[run_id] = RunTraining(
            self.learner,
            run,
            queue,
            RunVersions(
                capture=lambda version: adapter_state(self.learner.model),  # type: ignore[arg-type, return-value] # nobody looks at it
                publish=lambda version, captured, _: self.publishing.publish(run_id, version, captured),
                progress=Progress(),
                stall_s=self.stall_s,
            ),
            self.commands,
            trace.NoOpTracer(),
            ckpt=of.ckpt,
            own=own,
        )
        return made

    async def create(self, name: str, changed: Mapping[str, Any] | None = None, **asked: Any) -> None:
        of = RunSettings.model_validate({**settings(name).model_dump(), **(changed or {})})
        await self.host.create(name, of, **asked)

    async def submit(self, name: str, step: int, *, advantage: float | None = None, made: Batch | None = None) -> None:
        """Submits a batch, once there is a place for it."""
        queue = self.table.find(name)
        made = made or batch(name, step, dp_size=self.learner.parallel.plan.dp_size, advantage=advantage)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    queue.submit(made, f"{name}/{step}/{advantage}")
                except MeshError as error:
                    if error.reason.name != "OVERLOADED":
                        raise
                    await self.table.changed.next()
                else:
                    return

    async def train(self, name: str, steps: Sequence[int]) -> None:
        """Submits the batches of these steps and waits for the last to be done."""
        for step in steps:
            await self.submit(name, step)
        await self.until(name, steps[-1])

    async def until(self, name: str, step: int, state: StepState = StepState.DONE) -> None:
        async with asyncio.timeout(DEADLINE_S):
            async for event in self.table.find(name).watch(0):
                if (event.step, event.state) == (step, state):
                    return
        raise AssertionError(f"no {state} of step {step} of run {name}: {self.error}")

    async def when(self, holds: Callable[[], bool]) -> None:
        """Waits for what a change of some queue brings about."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await self.table.changed.next()

    def weights(self, name: str) -> torch.Tensor:
        """The flat adapter of a run, copied."""
        adapter_set = self.trainings[name].state.adapters
        assert adapter_set is not None
        return adapter_set.flat.clone()


@asynccontextmanager
async def many_runs(
    learner: Learner,
    output_dir: Path,
    *,
    max_runs: int = 8,
    room_bytes: int | None = None,
    stall_s: float = DEADLINE_S,
    hooks: RunHooks | None = None,
    joining: Joining | None = None,
) -> AsyncIterator[ManyRuns]:
    mesh = ManyRuns(
        learner, output_dir, max_runs=max_runs, room_bytes=room_bytes, stall_s=stall_s, hooks=hooks, joining=joining
    )
    mesh.thread.start()
    try:
        yield mesh
    finally:
        for run_id in list(mesh.publishing.waiting):
            mesh.publishing.release(run_id)
        mesh.table.close()
        await asyncio.to_thread(mesh.thread.join, DEADLINE_S)
        await mesh.host.close()
        assert not mesh.thread.is_alive()


async def trained(
    learner: Learner, output_dir: Path, names: Sequence[str], steps: int, joining: Joining | None = None
) -> dict[str, torch.Tensor]:
    """What the runs become that are created in this order and then train side by side."""
    async with many_runs(learner, output_dir, joining=joining) as mesh:
        for name in names:
            await mesh.create(name)
        await asyncio.gather(*(mesh.train(name, range(1, steps + 1)) for name in names))
        assert mesh.error is None
        return {name: mesh.weights(name) for name in names}


async def made_anew(learner: Learner, output_dir: Path, name: str, steps: int) -> dict[str, torch.Tensor]:
    """What a run becomes whose optimizer fails in step 3, after a checkpoint of step 2."""
    async with many_runs(learner, output_dir) as mesh:
        await mesh.create(name, {"ckpt": {"interval": 1}})
        await mesh.train(name, [1, 2])
        await mesh.when(lambda: mesh.table.find(name).book.durable_step == 2)
        await mesh.submit(name, 3)
        await mesh.when(lambda: mesh.table.find(name).book.epoch == 2)
        await mesh.train(name, range(3, steps + 1))
        assert mesh.error is None
        return {name: mesh.weights(name)}


def break_third_update() -> None:
    """The third step of an optimizer in this process fails."""
    step, calls = Optimizer.step, itertools.count(1)

    def fail(optimizer: Optimizer, rate: float) -> None:
        if next(calls) == 3:
            raise RuntimeError("a kernel failed")
        step(optimizer, rate)

    Optimizer.step = fail  # type: ignore[method-assign]


class SilentMaker(RunMaker):
    """Makes runs whose versions no rank but 0 has a part in."""

    def make(self, run_id: str, settings: RunSettings) -> RankRun:
        run = super().make(run_id, settings)
        run.snapshotter = SimpleNamespace(capture=lambda version: None)  # type: ignore[assignment] # all that is called
        return run


def main() -> None:
    model, output_dir, result, wanted = sys.argv[1:]
    torch.set_num_threads(1)
    parallel = RankGroup.start(os.environ, device=torch.device("cpu"))
    asked = json.loads(wanted)
    for number, names in enumerate(asked["runs"]):
        folder = Path(output_dir) / str(number)
        if parallel.plan.leads:
            joining, learner = JOINING if number in asked["joined"] else None, load(model, parallel)
            if number == asked["lost"]:
                found = asyncio.run(made_anew(learner, folder, names[0], asked["steps"]))
            else:
                found = asyncio.run(trained(learner, folder, names, asked["steps"], joining))
            save_file(found, f"{result}.{number}")
        else:
            if number == asked["lost"]:
                break_third_update()
            learner = load(model, parallel)
            maker = SilentMaker(learner, folder, base_name="base")
            RankWorker(learner, own_run(learner, folder), maker=maker, publish_dtype=torch.float32).run()
            parallel.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
