"""The socket pair between a front and its worker: frames arrive whole and in order, and each side sees the end."""

import asyncio
import socket

from meshrl.rollout.workers.link import FrameKind, Link


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
            def write(self, data):
                frames.append(data)

        source.connection_made(Wire())
        for number, size in enumerate((5, 0, 40)):
            source.send(FrameKind.SUMMARY, number, b"x" * size)
        stream = b"".join(frames)
        for step in (1, 2, 14, len(stream)):
            for at in range(0, len(stream), step):
                link.data_received(stream[at : at + step])
        assert got == [(FrameKind.SUMMARY, number, b"x" * size) for number, size in enumerate((5, 0, 40))] * 4

    asyncio.run(play())
