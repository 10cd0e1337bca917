"""The socket pair between a front and its worker: frames arrive whole and in order, and each side sees the end."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from google.rpc import status_pb2

from meshrl.rollout.workers import link as links
from meshrl.rollout.workers.blame import Fault
from meshrl.rollout.workers.link import FrameKind, Link
from meshrl.rollout.workers.process import WorkerLostError, WorkerProcess, WorkerSettings
from meshrl.rollout.workers.worker import FrontCalls
from meshrl.v1 import rollout_pb2 as pb


async def pair(mine, theirs):
    loop, ends = asyncio.get_running_loop(), []
    for sock, take in zip(socket.socketpair(), (mine, theirs), strict=True):
        _, link = await loop.create_connection(lambda take=take: Link(take), sock=sock)
        ends.append(link)
    return ends


async def test_frames_of_any_size_arrive_whole_and_in_order_and_an_end_is_seen():
    sent = [
        (FrameKind.EVENT, number, bytes([number % 251]) * size) for number, size in enumerate((0, 1, 13, 300_000, 7, 0))
    ]
    got, whole = [], asyncio.Event()

    def take(*frame):
        got.append(frame)
        if len(got) == len(sent):
            whole.set()

    front, worker = await pair(take, lambda *frame: None)
    for frame in sent:
        worker.send(*frame)
    worker.close()  # what was sent still goes
    await asyncio.wait_for(asyncio.gather(whole.wait(), front.left), 60.0)
    assert got == sent
    front.send(FrameKind.PLAY, 1, b"to nobody")  # the end is known; nothing is raised
    front.close()


def test_frames_that_come_in_any_pieces_are_put_together():
    async def play():
        got, frames = [], []
        link = Link(lambda *frame: got.append(frame))
        source = Link(lambda *frame: None)

        class Wire(asyncio.Transport):
            def set_write_buffer_limits(self, high=None, low=None):
                pass

            def write(self, data):
                frames.append(data)

        source.connection_made(Wire())
        for number, size in enumerate((5, 0, 40)):
            source.send(FrameKind.EVENT, number, b"x" * size)
        stream = b"".join(frames)
        for step in (1, 2, 14, len(stream)):
            for at in range(0, len(stream), step):
                link.data_received(stream[at : at + step])
        assert got == [(FrameKind.EVENT, number, b"x" * size) for number, size in enumerate((5, 0, 40))] * 4

    asyncio.run(play())


@pytest.fixture
async def full(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[socket.socket]]:
    """A link whose other side, a bare socket, takes nothing: more waits than may."""
    monkeypatch.setattr(links, "MOST_WAITING_BYTES", 1 << 20)

    async def fill(link):
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        for _ in range(8):
            link.send(FrameKind.STATUS, 0, bytes(1 << 20))
        assert not link.room.is_set()
        return theirs

    return fill


async def taken(sock, last):
    """Takes what comes, until something ends with `last`."""
    async with asyncio.timeout(60.0):
        while not (await asyncio.get_running_loop().sock_recv(sock, 1 << 20)).endswith(last):
            pass


async def test_a_worker_begins_no_rollout_while_its_front_takes_nothing(full):
    class Runner:
        def __init__(self):
            self.begun = asyncio.Event()

        async def run(self, request, emit):
            self.begun.set()

    calls, runner = FrontCalls(), Runner()
    front = await full(calls.link)
    calls._runner = runner
    request = pb.RunRolloutsRequest(environment="x", group_size=1).SerializeToString()
    calls._take(FrameKind.PLAY, 7, request)
    await asyncio.sleep(0.05)
    assert not runner.begun.is_set()
    taking = asyncio.create_task(taken(front, b"nothing ends so"))
    await asyncio.wait_for(runner.begun.wait(), 60.0)
    taking.cancel()
    front.close()


async def test_a_front_sends_no_call_to_a_worker_that_takes_none_until_it_does_or_the_call_is_lost(full):
    process = WorkerProcess(WorkerSettings(number=1, config=None))
    worker = await full(process._link)
    request = pb.RunRolloutsRequest(environment="kept")
    kept, lost = (asyncio.create_task(process.play(name, request)) for name in ("kept", "lost"))
    await asyncio.sleep(0)
    process.leave_to("kept")
    with pytest.raises(WorkerLostError) as left:
        await lost
    assert left.value.fault is Fault.OTHERS
    assert not kept.done()
    await taken(worker, b"kept")
    refused = status_pb2.Status(code=13).SerializeToString()
    process._take(FrameKind.EVENT, 1, refused)
    process._take(FrameKind.END, 1, b"")
    assert await kept == [refused]
    process.close()
    worker.close()
