"""A TCP forwarder whose link can be cut: what is on it is lost, and nobody gets through until it is mended."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress


class CutLink:
    """Listens on `address` and forwards to `target` (host:port), on a thread of its own. `cut` breaks what stands."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> CutLink:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._listening.close()

    def cut(self) -> None:
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(60.0)

    def mend(self) -> None:
        self._is_cut = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._forward, sock=self._listening))
        self._loop.run_forever()
        self._loop.run_until_complete(self._cut())
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _cut(self) -> None:
        self._is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            upstream, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, up_writer}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, up_writer))
                both.create_task(_copy(upstream, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
