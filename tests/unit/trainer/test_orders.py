"""Rank 0's orders: the bytes they travel in, the beats of an idle rank 0, and a rank that follows to the end."""

import queue
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.trainer.publishing.progress import Progress
from meshrl.trainer.ranks.commands import Beat, Gather, Order, Orders, Save, Stop, Train, decode, encode, follow
from meshrl.wire.convert import batch_digest
from meshrl.wire.types import Batch


class Line:
    """A group of two whose second rank reads what the first one broadcast."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self.sent: queue.Queue[bytes] = queue.Queue()

    def broadcast(self, data: bytes | None) -> bytes:
        if data is None:
            return self.sent.get(timeout=30.0)
        self.sent.put(data)
        return data

    def received(self) -> list[Order]:
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
    "order",
    [
        Gather(),
        *(Save(weights_only=w, in_background=b) for w in (True, False) for b in (True, False)),
        Beat(),
        Stop(),
    ],
)
def test_an_order_without_data_is_one_byte_and_comes_back(order: Order) -> None:
    assert len(encode(order)) == 1
    assert decode(encode(order)) == order


def test_a_batch_arrives_to_the_bit() -> None:
    sent = batch()
    order = decode(encode(Train(batch=sent)))
    assert isinstance(order, Train)
    came = order.batch
    assert batch_digest(came) == batch_digest(sent)
    assert [row.dp_rank for row in came.micro_batches] == [row.dp_rank for row in sent.micro_batches]
    assert [row.rollout_ids for row in came.micro_batches] == [row.rollout_ids for row in sent.micro_batches]
    assert (came.run_id, came.step, came.loss_tokens) == ("main", 3, sent.loss_tokens)
    assert (came.environments, came.traceparent) == (("a", "b"), sent.traceparent)


def test_one_process_alone_says_nothing_and_waits_for_its_future() -> None:
    line = Line(world_size=1)
    orders = Orders(line, beat_s=0.01)
    orders.give(Train(batch=batch()))
    future: Future[int] = Future()
    threading.Timer(0.05, future.set_result, [7]).start()
    assert orders.wait(future) == 7
    assert line.received() == []


def test_rank_0_beats_while_it_waits() -> None:
    line = Line()
    future: Future[int] = Future()
    threading.Timer(0.2, future.set_result, [7]).start()
    assert Orders(line, beat_s=0.02).wait(future) == 7
    beats = line.received()
    assert len(beats) >= 3
    assert set(beats) == {Beat()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wait_ends_when_what_is_waited_for_stands_still(world_size: int) -> None:
    with pytest.raises(TimeoutError, match=r"nothing moved for 0\.05 s"):
        Orders(Line(world_size), beat_s=0.02).wait(Future(), progress=Progress(), stall_s=0.05)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wait_goes_on_as_long_as_there_may_be_no_sign(world_size: int) -> None:
    future: Future[int] = Future()
    progress = Progress()
    progress.moved(unseen_s=30.0)
    threading.Timer(0.3, future.set_result, [7]).start()
    assert Orders(Line(world_size), beat_s=0.02).wait(future, progress=progress, stall_s=0.05) == 7


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_timeout_that_the_work_itself_raised_is_not_waited_for_again(world_size: int) -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError("the hub's"))
    with pytest.raises(TimeoutError, match="the hub's"):
        Orders(Line(world_size), beat_s=0.02).wait(future, progress=Progress(), stall_s=5)


def test_a_follower_carries_out_orders_in_order_skips_beats_and_ends_at_stop() -> None:
    line = Line()
    orders = Orders(line)
    for order in (Beat(), Train(batch=batch()), Gather(), Beat(), Save(weights_only=True), Stop(), Gather()):
        orders.give(order)
    done: list[type[Order]] = []
    follow(line, lambda order: done.append(type(order)))
    assert done == [Train, Gather, Save]


def test_an_order_that_fails_ends_the_follower() -> None:
    line = Line()
    Orders(line).give(Gather())

    def fail(order: Order) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        follow(line, fail)
