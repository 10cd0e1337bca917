"""Ranks watch each other and their agent, and end when one of them is gone."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from meshrl.training.parallel.rank_group import RankGroup

POLL_S = 0.25

AGENT_PID = "MESHRL_AGENT_PID"
"""Variable by which our agent names itself to its ranks."""

LOST_PEER = 75  # exit code of a rank that leaves because another one did; tells the agent whose fault it was not
TIE_DEADLINE_S = 60.0
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine that is unplugged says no goodbye
_LEAVING = b"."
_TOKEN_BYTES = 16
_RANK_BYTES = 4


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
    def tie(cls, ranks: RankGroup, environment: Mapping[str, str]) -> Lifeline:
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
    logger.error("{}; a training group ends as a whole, so this rank leaves too", what)
    os._exit(LOST_PEER)


def _says_goodbye(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == _LEAVING
    except OSError:  # reset, or the machine does not answer any more
        return False


def _accept_all(ranks: RankGroup, environment: Mapping[str, str]) -> dict[socket.socket, str]:
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


def _connect(ranks: RankGroup) -> dict[socket.socket, str]:
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
