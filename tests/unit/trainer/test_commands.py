"""Rank 0's commands: the bytes they travel in, the beats of an idle rank 0, and a rank that follows to the end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.trainer.publishing.snapshots import PublicationSettings
from meshrl.trainer.ranks.commands import (
    Command,
    CommandSender,
    CreateCommand,
    DeleteCommand,
    HeartbeatCommand,
    PassCommand,
    PublishSetupCommand,
    SaveCommand,
    SnapshotCommand,
    StopCommand,
    TrainCommand,
    decode,
    encode,
    receive_commands,
)
from meshrl.trainer.ranks.rank_runs import RankRun
from meshrl.trainer.ranks.worker import RankWorker
from meshrl.trainer.runs.settings import RunSettings
from meshrl.training.model_config import LoraConfig
from meshrl.versions.progress import Progress
from meshrl.wire.convert import batch_digest
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch

SETTINGS = PublicationSettings(
    transport="TRANSPORT_FILESYSTEM",
    epoch=2,
    adapter_only=False,
    in_shares=True,
    folder="/tmp/versions",
    chunk_bytes=2**20,
    bucket_bytes=2**20,
    num_threads=1,
    backend="gloo",
    deadline_s=20.0,
)


class Line:
    """A group of two whose second rank reads what the first one broadcast."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self.sent: queue.Queue[bytes] = queue.Queue()

    def broadcast(self, data: bytes | None) -> bytes:
        if data is None:
            return self.sent.get(timeout=60.0)
        self.sent.put(data)
        return data

    def received(self) -> list[Command]:
        return [decode(self.sent.get_nowait()) for _ in range(self.sent.qsize())]


def batch(step: int = 3) -> Batch:
    sample = TrainSample(
        token_ids=np.arange(6, dtype=np.int32),
        loss_mask=np.arange(6) >= 2,
        logprobs=np.full(6, -2.0, np.float32),
        advantage=0.5,
        rollout_id="r",
    )
    packing = pack_samples([sample] * 5, seq_len=16, dp_size=2)
    return Batch(
        run_id="main",
        step=step,
        micro_batches=packing.micro_batches,
        loss_tokens=packing.loss_tokens,
        environments=("a", "b"),
        traceparent="00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01",
    )


@pytest.mark.parametrize(
    "command",
    [
        SnapshotCommand(run_id="main"),
        *(SaveCommand(run_id="läufe/a", weights_only=w, in_background=b) for w in (True, False) for b in (True, False)),
        PublishSetupCommand(run_id="main", settings=SETTINGS),
        PassCommand(run_id="main", slices=3),
        PassCommand(run_id="main", slices=1, beside=("a", "run two")),
        CreateCommand(run_id="läufe/a", settings=RunSettings(seed=3, lora=LoraConfig(rank=4))),
        DeleteCommand(run_id="main"),
        HeartbeatCommand(),
        StopCommand(),
    ],
    ids=repr,
)
def test_a_command_comes_back_with_its_run(command: Command) -> None:
    assert decode(encode(command)) == command


def test_a_batch_arrives_to_the_bit() -> None:
    sent = batch()
    command = decode(encode(TrainCommand(run_id="main", micro_batches=sent.micro_batches)))
    assert isinstance(command, TrainCommand)
    assert command.run_id == "main"
    came = replace(sent, micro_batches=tuple(command.micro_batches))
    assert batch_digest(came) == batch_digest(sent)
    assert [row.dp_rank for row in came.micro_batches] == [row.dp_rank for row in sent.micro_batches]
    assert [row.rollout_ids for row in came.micro_batches] == [row.rollout_ids for row in sent.micro_batches]


def test_one_process_alone_says_nothing_and_waits_for_its_future() -> None:
    line = Line(world_size=1)
    commands = CommandSender(line, heartbeat_s=0.01)
    commands.send(TrainCommand(run_id="main", micro_batches=batch().micro_batches))
    future: Future[int] = Future()
    threading.Timer(0.05, future.set_result, [7]).start()
    assert commands.wait(future) == 7
    assert line.received() == []


def test_rank_0_beats_while_it_waits() -> None:
    future: Future[int] = Future()

    class Counted(Line):
        def broadcast(self, data: bytes | None) -> bytes:
            sent = super().broadcast(data)
            if self.sent.qsize() == 3:
                future.set_result(7)
            return sent

    line = Counted()
    assert CommandSender(line, heartbeat_s=0.02).wait(future) == 7
    assert line.received() == [HeartbeatCommand()] * 3


def within(progress: Progress, stall_s: float) -> Callable[[], float]:
    def check() -> float:
        if (left_s := progress.left_s(stall_s)) <= 0:
            raise TimeoutError("nothing moved")
        return left_s

    return check


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wait_ends_when_what_is_waited_for_stands_still(world_size: int) -> None:
    with pytest.raises(TimeoutError, match="nothing moved"):
        CommandSender(Line(world_size), heartbeat_s=0.02).wait(Future(), check=within(Progress(), 0.05))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wait_goes_on_as_long_as_there_may_be_no_sign(world_size: int) -> None:
    future: Future[int] = Future()
    progress = Progress()
    progress.moved(unseen_s=30.0)
    threading.Timer(0.3, future.set_result, [7]).start()
    assert CommandSender(Line(world_size), heartbeat_s=0.02).wait(future, check=within(progress, 0.05)) == 7


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_timeout_that_the_work_itself_raised_is_not_waited_for_again(world_size: int) -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError("the hub's"))
    with pytest.raises(TimeoutError, match="the hub's"):
        CommandSender(Line(world_size), heartbeat_s=0.02).wait(future, check=within(Progress(), 5.0))


def test_a_follower_carries_out_orders_in_order_skips_beats_and_ends_at_stop() -> None:
    line = Line()
    commands = CommandSender(line)
    for command in (
        HeartbeatCommand(),
        TrainCommand(run_id="main", micro_batches=batch().micro_batches),
        SnapshotCommand(run_id="main"),
        HeartbeatCommand(),
        SaveCommand(run_id="main", weights_only=True),
        StopCommand(),
        SnapshotCommand(run_id="main"),
    ):
        commands.send(command)
    done: list[type[Command]] = []
    receive_commands(line, lambda command: done.append(type(command)))
    assert done == [TrainCommand, SnapshotCommand, SaveCommand]


def test_a_command_that_fails_ends_the_follower() -> None:
    line = Line()
    CommandSender(line).send(SnapshotCommand(run_id="main"))

    def fail(command: Command) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        receive_commands(line, fail)


def test_a_rank_refuses_a_command_for_a_run_that_it_does_not_hold() -> None:
    line = Line()
    CommandSender(line).send(SnapshotCommand(run_id="other"))
    nothing: Any = SimpleNamespace()
    learner: Any = SimpleNamespace(parallel=line)
    run: Any = SimpleNamespace(run_id="main")
    own = RankRun(state=run, checkpointer=nothing)
    with pytest.raises(MeshError, match="sent a command for run 'other', and this rank holds 'main'") as refused:
        RankWorker(learner, own, maker=nothing, publish_dtype=torch.bfloat16).run()
    assert refused.value.reason is Reason.UNKNOWN_RUN


def test_a_rank_carries_out_each_command_for_the_run_that_it_names() -> None:
    line = Line()
    commands = CommandSender(line)
    commands.send(CreateCommand(run_id="second", settings=RunSettings()))
    saves = [("main", False, True), ("second", True, False), ("main", True, False)]
    for run_id, weights_only, in_background in saves:
        commands.send(SaveCommand(run_id=run_id, weights_only=weights_only, in_background=in_background))
    commands.send(StopCommand())
    done: list[tuple[object, ...]] = []

    def run(run_id: str) -> RankRun:
        state: Any = SimpleNamespace(run_id=run_id)
        checkpointer: Any = SimpleNamespace(
            save=lambda *, weights_only, in_background: done.append((run_id, weights_only, in_background)),
            wait_for_save=lambda: done.append((run_id, "waited")),
        )
        return RankRun(state=state, checkpointer=checkpointer)

    learner: Any = SimpleNamespace(parallel=line)
    maker: Any = SimpleNamespace(make=lambda run_id, settings: run(run_id))
    RankWorker(learner, run("main"), maker=maker, publish_dtype=torch.bfloat16).run()
    assert done == [*saves, ("main", "waited"), ("second", "waited")]
