"""Sends and takes raw bytes of versions over HTTP (raw_port in weights.proto), without the copies of gRPC's messages,
which hold the interpreter's lock. For hubs that check no callers."""

from __future__ import annotations

import asyncio
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

import numpy as np
from loguru import logger

from meshrl.core.config import ConfigError
from meshrl.versions.raw_bytes import receive, set_deadline
from meshrl.weights.hub import Hub
from meshrl.wire.errors import FieldViolation, MeshError, invalid

SILENT_S = 60.0  # of a connection, until it is closed
LOOK_S = 0.1  # for the end
ANSWER_S = 90.0  # of the hub, beyond its own deadlines

_PATH = re.compile(r"/artifacts/([0-9a-f]{64})")
_RANGE = re.compile(r"bytes[= ]([0-9]{1,18})-([0-9]{1,18})(?:/[0-9]{1,18})?")

_T = TypeVar("_T")


class RawServer:
    """A thread for each connection; `start` and `stop` on the hub's event loop."""

    def __init__(self, hub: Hub, host: str, port: int) -> None:
        self._hub, self._host, self.port = hub, host, port
        self._server: _Server | None = None

    def start(self) -> None:
        """Replaces port 0 by a free one. Raises ConfigError when the port cannot be bound."""
        try:
            self._server = _Server(self._hub, asyncio.get_running_loop(), (self._host, self.port))
        except OSError as error:
            text = f"cannot listen on port {self.port} of {self._host}: {error.strerror}"
            raise ConfigError(f"{text}; set another raw_port, or 0 for a free one") from error
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), name="raw", daemon=True).start()

    async def stop(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop, at: tuple[str, int]) -> None:
        self.hub, self.loop = hub, loop
        self.address_family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
        self._open: set[socket.socket] = set()
        super().__init__(at, _Handler)

    def ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        """On the event loop, from another thread. Raises the errors of `work`, and TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(ANSWER_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.opt(exception=True).debug("the connection of {} for raw bytes broke", client_address)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in tuple(self._open):
            with suppress(OSError):  # it is over already
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rbufsize = 4096  # a request's head
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        set_deadline(self.request, SILENT_S)
        super().setup()

    def do_GET(self) -> None:
        self._answer("Range", self._send)

    def do_PUT(self) -> None:
        self._answer("Content-Range", self._take)

    def _answer(self, header: str, work: Callable[[str, int, int], None]) -> None:
        self._begun = False  # to send bytes
        path, asked = _PATH.fullmatch(self.path), _RANGE.fullmatch(self.headers.get(header, ""))
        try:
            if path is None or asked is None or int(asked[2]) < int(asked[1]):
                text = f"must be /artifacts/ID, with a range of bytes in {header}"
                raise invalid([FieldViolation("path", text)])
            work(path[1], int(asked[1]), int(asked[2]) + 1)
        except MeshError as error:
            self._refuse(error)

    def _refuse(self, error: MeshError) -> None:
        """A client that has got a part of its bytes sees the end of the connection alone."""
        self.close_connection = True
        logger.debug("{} {} is refused: {}", self.command, self.path, error)
        if not self._begun:
            self.send_error(HTTPStatus.CONFLICT, error.reason.name, str(error))

    def _send(self, artifact_id: str, at: int, end: int) -> None:
        num_bytes = end - at
        while at < end:
            held, stop = self.server.ask(self.server.hub.raw_fetch(artifact_id, at, end))
            if not self._begun:
                self._begun = True
                self.send_response(HTTPStatus.PARTIAL_CONTENT)
                self.send_header("Content-Length", str(num_bytes))
                self.end_headers()
            held.send(self.connection, at, stop)
            at = stop

    def _take(self, artifact_id: str, at: int, end: int) -> None:
        held, came = self.server.ask(self.server.hub.raw_upload(artifact_id))
        chunks = held.chunks_of(at, end)
        room = np.empty(max(chunk.length for chunk in chunks), dtype=np.uint8)
        for chunk in chunks:
            data = room[: chunk.length]
            receive(self.connection, self.rfile, data.data)
            held.take(chunk, data)
            self.server.loop.call_soon_threadsafe(came)
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """One line for each range would be too many."""
