"""Tries of another user of this machine; becoming one takes root."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshrl.client import ChannelOptions
from meshrl.client.channel import ServiceClient
from meshrl.client.credentials import Credentials
from meshrl.core.private_folders import SHM
from meshrl.wire.errors import MeshError, Reason

OTHER = 65534
"""The user `nobody`."""


def as_other_user(work: Callable[[], object]) -> Any:
    """What `work` returns, as JSON carries it, in a process of the other user."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.write(writes, json.dumps(work()).encode())
        except BaseException as error:  # noqa: BLE001  # it is told, and the process ends
            os.write(writes, json.dumps(f"it failed: {error!r}").encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return json.loads(told)


def ends(paths: Sequence[tuple[str, bool]]) -> list[str]:
    """How reading and replacing each path (whether it is a folder) ends; empty for a try that succeeded."""
    ended = []
    for path, is_folder in paths:
        for kind in ("read", "write"):
            try:
                if is_folder and kind == "read":
                    os.listdir(path)
                elif is_folder:
                    Path(path, "planted").touch()
                else:
                    os.close(os.open(path, os.O_RDONLY if kind == "read" else os.O_WRONLY))
                ended.append("")
            except OSError as error:
                ended.append(f"{error.strerror}")
    return ended


def files_of(folder: Path) -> list[tuple[str, bool]]:
    return [(str(path), path.is_dir()) for path in (folder, *folder.rglob("*")) if not path.is_symlink()]


def posted(port: int, route: str, key: str) -> tuple[bool, str]:
    """Whether an engine takes a request with this key, and what it answers."""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.socket() as connection:
        connection.settimeout(30.0)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"{head}{shown}Content-Length: 2\r\n\r\n{{}}".encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    status, body = answer.split()[1].decode(), answer.partition(b"\r\n\r\n")[2].decode()
    return status not in ("401", "403"), f"{status} {body}"


def called(
    kind: type[ServiceClient], port: int, method: str, credentials: Credentials, **arguments: object
) -> tuple[bool, str]:
    """Whether a service of the run takes a call with these credentials, and what it answers."""

    async def call() -> tuple[bool, str]:
        options = ChannelOptions(credentials=credentials, retry_attempts=2)
        async with kind(f"127.0.0.1:{port}", options) as client:
            try:
                return True, str(await getattr(client, method)(**arguments))
            except MeshError as error:
                return error.reason not in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED), str(error)

    return asyncio.run(call())


def plant(output_dir: Path) -> list[Path]:
    """Makes, as the other user, the folders whose names could be guessed from a run's output folder."""
    name = hashlib.blake2s(str(output_dir.absolute()).encode(), digest_size=6).hexdigest()
    planted = [SHM / f"meshrl-0-{name}"]
    as_other_user(lambda: [os.makedirs(folder, 0o777, exist_ok=True) for folder in planted])
    return planted
