"""Ends processes whose parent or peer is gone, and removes their files.

Ranks and processes of `multiprocessing` watch their peers and parent themselves. Others are ended by a guardian beside
their starter: this file as a script, with the standard library alone, `orphans.py GRACE_S LOCK_FILE MARK FOLDER...`. It
reads from stdin `+PID` for a process group that was started, `-PID` for one that is gone. At the end of stdin groups
that are left are asked to end and killed after the grace, processes with MARK in their environment killed, and the
folders removed, unless another process has LOCK_FILE locked.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

POLL_S = 0.25

AGENT_PID = "MESHRL_AGENT_PID"
"""Variable by which our agent names itself to its ranks."""

RUN_MARK = "MESHRL_RUN_MARK"
WORKER_MARK = "MESHRL_WORKER_MARK"
"""Variables that programs of a run, and of a worker of rollouts, hand down to whatever they start."""

ORPHANED = 70
"""Exit code of a process whose program is gone."""

END_POLL_S = 0.05
CLOSE_DEADLINE_S = 30.0

LOST_PEER = 75  # exit code of a rank that leaves because another one did; tells the agent whose fault it was not
TIE_DEADLINE_S = 60.0
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine that is unplugged says no goodbye
_LEAVING = b"."
_TOKEN_BYTES = 16
_RANK_BYTES = 4


class WatchedRanks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank."""


class Lifeline:
    """A rank's silent connections to the others of its training group; one that breaks ends the process. A collective
    that waits for a dead rank may hang for minutes, in code that no signal reaches."""

    def __init__(self, peers: Mapping[socket.socket, str], parent: int | None) -> None:
        self._peers = dict(peers)
        self._parent = parent
        self._released = threading.Event()
        if self._peers or parent is not None:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def tie(cls, ranks: WatchedRanks, environment: Mapping[str, str]) -> Lifeline:
        """Connects this rank with rank 0; collective. An agent, which is the parent process, is watched as well."""
        parent = _agent_of(environment)
        peers: dict[socket.socket, str] = {}
        if ranks.world_size > 1:
            peers = _accept_all(ranks, environment) if ranks.rank == 0 else _connect(ranks)
        return cls(peers, parent)

    def release(self) -> None:
        """An orderly end: from here on neither this rank's end nor another's alarms."""
        self._released.set()
        for peer in self._peers:
            try:
                peer.send(_LEAVING)
                peer.close()
            except OSError:  # it left first
                continue

    def _watch(self) -> None:
        watched = dict(self._peers)
        while not self._released.is_set():
            if self._parent is not None and os.getppid() != self._parent:
                self._report("the agent that started this rank is gone")
                return
            if not watched:
                time.sleep(POLL_S)
                continue
            try:
                readable, _, _ = select.select(list(watched), [], [], POLL_S)
            except (OSError, ValueError):  # closed by release
                return
            for peer in readable:
                if not _says_goodbye(peer):
                    self._report(f"{watched[peer]} is gone")
                    return
                del watched[peer]

    def _report(self, what: str) -> None:
        if not self._released.is_set():
            _leave(what)


def end_with_agent(environment: Mapping[str, str]) -> None:
    """Ends this process soon after the agent of ours that has started it, even when that is gone already. Called
    before anything that takes time: ranks that import torch or look for each other would wait for minutes."""
    if AGENT_PID in environment:
        Lifeline({}, _agent_of(environment))


def _agent_of(environment: Mapping[str, str]) -> int | None:
    if AGENT_PID in environment:
        return int(environment[AGENT_PID])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None


def _leave(what: str) -> None:
    from loguru import logger  # a guardian has the standard library alone

    logger.error("{}; a training group ends as a whole, so this rank leaves too", what)
    os._exit(LOST_PEER)


def _says_goodbye(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == _LEAVING
    except OSError:  # reset, or the machine does not answer any more
        return False


def _accept_all(ranks: WatchedRanks, environment: Mapping[str, str]) -> dict[socket.socket, str]:
    one_machine = environment.get("LOCAL_WORLD_SIZE") == str(ranks.world_size)
    host = "127.0.0.1" if one_machine else environment.get("MASTER_ADDR", "127.0.0.1")
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    token = os.urandom(_TOKEN_BYTES)
    peers: dict[socket.socket, str] = {}
    with socket.create_server(address[:2], family=family, backlog=ranks.world_size) as server:
        server.settimeout(TIE_DEADLINE_S)
        ranks.broadcast(token + f"{host} {server.getsockname()[1]}".encode())
        while len(peers) < ranks.world_size - 1:
            peer, _ = server.accept()
            peer.settimeout(TIE_DEADLINE_S)
            hello = peer.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
            if hello[:_TOKEN_BYTES] != token:  # a stranger on this port
                peer.close()
                continue
            peers[_kept_alive(peer)] = f"rank {int.from_bytes(hello[_TOKEN_BYTES:], 'little')}"
    return peers


def _connect(ranks: WatchedRanks) -> dict[socket.socket, str]:
    told = ranks.broadcast(None)
    host, port = told[_TOKEN_BYTES:].decode().split()
    peer = socket.create_connection((host, int(port)), timeout=TIE_DEADLINE_S)
    peer.sendall(told[:_TOKEN_BYTES] + ranks.rank.to_bytes(_RANK_BYTES, "little"))
    return {_kept_alive(peer): "rank 0"}


def _kept_alive(peer: socket.socket) -> socket.socket:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # macOS lacks some
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
    peer.settimeout(None)
    return peer


def end_with_parent(*, whole_group: bool = False) -> None:
    """Ends this process soon after the one that started it with `multiprocessing`, also when that is killed.

    With `whole_group`, which needs a process that leads its group, the programs that it started end too: nothing else
    watches the program above vLLM's engine process, whose SIGKILL would leave the model in the GPU's memory.
    """
    import multiprocessing
    from multiprocessing.connection import wait  # tens of milliseconds, which a guardian does not need

    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        if whole_group:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="meshrl-orphan-watch", daemon=True).start()


def guardian_command(
    grace_s: float, folders: Sequence[Path], *, lock_file: Path | None = None, mark: str = ""
) -> list[str]:
    """Its stdin must be a pipe, and it needs a session of its own."""
    lock = "" if lock_file is None else str(lock_file.absolute())
    known = [sys.executable, "-I", "-S", __file__, str(grace_s), lock, mark]
    return [*known, *(str(folder.absolute()) for folder in folders)]


class FolderGuardian:
    """Has a folder removed once this process is gone, unless another process has `lock_file` locked by then."""

    def __init__(self, folder: Path, *, lock_file: Path | None = None) -> None:
        self._process = subprocess.Popen(
            guardian_command(0.0, [folder], lock_file=lock_file),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=_unmarked(),
        )

    def close(self) -> None:
        """Has the guardian do its work now; blocking."""
        try:
            self._process.communicate(timeout=CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:  # a large folder: it goes on by itself
            return


@contextmanager
def children_end_too() -> Iterator[None]:
    """Kills after the block all that this process started in it, also when this process is killed. In a program of a
    run the guardian of `rl` does that. On Linux alone."""
    if RUN_MARK in os.environ:
        yield
        return
    command = guardian_command(0.0, [], mark=(mark := secrets.token_hex(16)))
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_unmarked())
    os.environ[RUN_MARK] = mark
    try:
        yield
    finally:
        del os.environ[RUN_MARK]
        with suppress(subprocess.TimeoutExpired):  # it goes on by itself
            guardian.communicate(timeout=CLOSE_DEADLINE_S)


def _unmarked() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (RUN_MARK, WORKER_MARK)}


def _signal(groups: set[int], signum: int) -> set[int]:
    alive = set()
    for group in groups:
        try:
            os.killpg(group, signum)
        except ProcessLookupError:
            continue
        except PermissionError:  # the number belongs to somebody else by now
            continue
        alive.add(group)
    return alive


def end_marked(name: str, mark: str) -> None:
    """Kills every process that was started with the variable `name` set to `mark`; on Linux alone."""
    wanted = f"{name}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # another user's, or gone by now
            continue


def is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it is not there, or not readable: nobody holds it
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def guard() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # outlives the guarded process on purpose, and ends with its stdin
    grace_s, lock_file, mark, *folders = sys.argv[1:]
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    alive = _signal(groups, signal.SIGTERM)
    deadline = time.monotonic() + float(grace_s)
    while alive and time.monotonic() < deadline:
        time.sleep(END_POLL_S)
        alive = _signal(alive, 0)
    _signal(alive, signal.SIGKILL)
    if mark:
        end_marked(RUN_MARK, mark)
    if not (lock_file and is_locked(lock_file)):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)  # most often it is gone already


if __name__ == "__main__":
    guard()
