"""Ends every rank of a training group soon after one of them, or the agent that started them, is gone.

A collective that waits for a dead rank may hang for minutes, in code that no signal reaches. So each rank keeps a TCP
connection to rank 0 on which nothing is said, and a thread that watches it: when a process dies, for whatever reason,
the system closes its side. Tied right after the group is up, before the model is loaded.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from loguru import logger

AGENT_PID = "MESHRL_AGENT_PID"
"""Environment variable by which our agent tells a rank whom to watch."""

LOST_PEER = 75  # exit code of a rank that leaves because another one did; tells the agent whose fault it was not
POLL_S = 0.25
TIE_DEADLINE_S = 60.0
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine that is unplugged says no goodbye
_LEAVING = b"."
_TOKEN_BYTES = 16
_RANK_BYTES = 4


class Group(Protocol):
    """What a lifeline needs of the parallel context."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank."""


class Lifeline:
    """The connections of this process to its group. `lost` is called, on a thread of its own, when one breaks."""

    def __init__(self, peers: Mapping[socket.socket, str], *, lost: Callable[[str], None], parent: int | None) -> None:
        self._peers = dict(peers)
        self._lost = lost
        self._parent = parent
        self._released = threading.Event()
        if self._peers or parent is not None:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def tie(
        cls, group: Group, environment: Mapping[str, str], *, lost: Callable[[str], None] | None = None
    ) -> Lifeline:
        """Connects this rank with rank 0; collective. By default a broken line ends the process.

        Under torchrun the agent, which is the parent process, is watched as well.
        """
        parent = _agent_of(environment)
        peers: dict[socket.socket, str] = {}
        if group.world_size > 1:
            peers = _accept_all(group, environment) if group.rank == 0 else _connect(group)
        return cls(peers, lost=lost or leave_at_once, parent=parent)

    def release(self) -> None:
        """Says that this rank is about to leave in order. From here on its end alarms nobody, nor others' end it."""
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
            self._lost(what)


def end_with_agent(environment: Mapping[str, str]) -> None:
    """Ends this process soon after the agent that has started it, even when that is gone already.

    Called before anything that takes time: an agent that is killed while its ranks import torch or look for each other
    would leave them to wait for minutes. Does nothing in a process that is no rank of an agent of ours.
    """
    if AGENT_PID in environment:
        Lifeline({}, lost=leave_at_once, parent=_agent_of(environment))


def _agent_of(environment: Mapping[str, str]) -> int | None:
    """Process id of the agent that has started this rank; None for a process on its own.

    The torchrun command does not say its own: there it is the parent, unless it is gone already.
    """
    if AGENT_PID in environment:
        return int(environment[AGENT_PID])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None


def leave_at_once(what: str) -> None:
    """Ends this process with LOST_PEER, whatever its other threads wait for."""
    logger.error("{}; a training group ends as a whole, so this rank leaves too", what)
    os._exit(LOST_PEER)


def _says_goodbye(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == _LEAVING
    except OSError:  # reset, or the machine does not answer any more
        return False


def _accept_all(group: Group, environment: Mapping[str, str]) -> dict[socket.socket, str]:
    """Rank 0: tells the others where to connect and waits for all of them."""
    one_machine = environment.get("LOCAL_WORLD_SIZE") == str(group.world_size)
    host = "127.0.0.1" if one_machine else environment.get("MASTER_ADDR", "127.0.0.1")
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    token = secrets.token_bytes(_TOKEN_BYTES)
    peers: dict[socket.socket, str] = {}
    with socket.create_server(address[:2], family=family, backlog=group.world_size) as server:
        server.settimeout(TIE_DEADLINE_S)
        group.broadcast(token + f"{host} {server.getsockname()[1]}".encode())
        while len(peers) < group.world_size - 1:
            peer, _ = server.accept()
            peer.settimeout(TIE_DEADLINE_S)
            hello = peer.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
            if hello[:_TOKEN_BYTES] != token:  # a stranger on this port
                peer.close()
                continue
            peers[_kept_alive(peer)] = f"rank {int.from_bytes(hello[_TOKEN_BYTES:], 'little')}"
    return peers


def _connect(group: Group) -> dict[socket.socket, str]:
    told = group.broadcast(None)
    host, port = told[_TOKEN_BYTES:].decode().split()
    peer = socket.create_connection((host, int(port)), timeout=TIE_DEADLINE_S)
    peer.sendall(told[:_TOKEN_BYTES] + group.rank.to_bytes(_RANK_BYTES, "little"))
    return {_kept_alive(peer): "rank 0"}


def _kept_alive(peer: socket.socket) -> socket.socket:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # macOS lacks some
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
    peer.settimeout(None)
    return peer
