"""The internet in a box does what it says: rate, delay, loss, silence, and a NAT that forgets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from wan_rig import PERFECT, Line, Wan, open_wan

ECHO = """
import socket, threading
def serve(each):
    with each:
        while data := each.recv(65536):
            each.sendall(data)
listener = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
TRY = """
import json, socket, sys, time
address, num_bytes = sys.argv[1], int(sys.argv[2])
began_s = time.monotonic()
with socket.create_connection((address, 5000), timeout=120.0) as line:
    connected_s = time.monotonic() - began_s
    used = line.getsockopt(socket.IPPROTO_TCP, 13, 16).split(b"\\0")[0].decode()
    print(json.dumps({"connected_s": connected_s, "congestion_control": used}), flush=True)
    left = 0
    while asked := sys.stdin.readline():
        line.settimeout(float(asked))
        left += num_bytes
        try:
            line.sendall(bytes(num_bytes))
            while left:
                left -= len(line.recv(65536))
        except TimeoutError:
            print("nothing", flush=True)
        else:
            print(time.monotonic() - began_s, flush=True)
"""


class Conversation:
    """A TCP connection from a site to the origin, which sends everything back."""

    def __init__(self, wan: Wan, site: str, num_bytes: int) -> None:
        command = [sys.executable, "-c", TRY, wan.addresses["origin"], str(num_bytes)]
        self._program = wan.start(site, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._program.stdout is not None
        self.told = json.loads(self._program.stdout.readline())

    def echo(self, deadline_s: float = 100.0) -> str:
        """Sends the bytes; returns when they and those of earlier calls were back, or "nothing"."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(f"{deadline_s}\n")
        self._program.stdin.flush()
        said: str = self._program.stdout.readline()
        return said.strip()


@pytest.fixture
def wan() -> Iterator[Wan]:
    lines = {"origin": PERFECT, "far": Line(down_mbps=20.0, up_mbps=20.0, delay_s=0.05), "home": Line(nat=True)}
    with open_wan(lines) as wan:
        echo = wan.start("origin", [sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
        assert echo.stdout is not None
        assert echo.stdout.readline().strip() == "ready"
        yield wan


def test_a_line_is_as_slow_and_as_far_as_it_says_and_tcp_is_cubic(wan: Wan) -> None:
    talk = Conversation(wan, "far", 2**20)
    assert talk.told["congestion_control"] == "cubic"
    assert talk.told["connected_s"] >= 0.1
    assert float(talk.echo()) >= 2**20 * 8 / 20e6
    sent = wan.change()
    assert sent["far"]["up"] >= 2**20
    assert sent["far"]["down"] >= 2**20


def test_nothing_passes_a_black_hole_and_everything_after_it(wan: Wan) -> None:
    talk = Conversation(wan, "far", 10)
    wan.change("far", hole_s=5.0)
    before = wan.change()
    assert talk.echo(deadline_s=1.0) == "nothing"
    assert wan.change() == before
    assert float(talk.echo()) >= 5.0


def test_a_nat_that_forgot_a_flow_drops_it_without_a_word_and_lets_new_ones_through(wan: Wan) -> None:
    talk = Conversation(wan, "home", 10)
    assert talk.echo() != "nothing"
    wan.change("home", forget=True)
    assert talk.echo(deadline_s=1.0) == "nothing"
    assert Conversation(wan, "home", 10).echo() != "nothing"
