"""The watchdog of a worker counts what code of an environment blocks, not what the machine gives to other programs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from meshrl.rollout.workers.watchdog import Watchdog, playing, starved_s

REPORTED_S = 0.75


async def reports_of_a_block(starved: Callable[[int], float], seconds: float) -> list[dict[str, object]]:
    """The reports while the code of an environment blocks the event loop for `seconds`."""
    front, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    Watchdog(worker, starved).start()

    async def block() -> None:
        time.sleep(seconds)  # noqa: ASYNC251  # blocks, as the test is about

    with playing("mine", "rollout 1"):
        await asyncio.create_task(block())
    front.setblocking(False)
    found: list[dict[str, object]] = []
    with front, suppress(BlockingIOError):
        while True:
            found.append(json.loads(front.recv(65536)))
    return found


@pytest.fixture(autouse=True)
def keep_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", os._exit)  # a watchdog replaces it


async def test_code_that_blocks_is_reported_with_its_environment() -> None:
    reports = await reports_of_a_block(lambda thread: 0.0, 4 * REPORTED_S)
    assert reports
    assert {(each["kind"], each["environment"]) for each in reports} == {("blocked", "mine")}


async def test_time_without_a_processor_is_not_reported() -> None:
    assert await reports_of_a_block(lambda thread: time.monotonic(), 2 * REPORTED_S) == []


LOOKS = """
import asyncio, gc, os, socket, sys, threading, time
sys.path[:0] = sys.argv[1:]
from meshrl.rollout.workers.watchdog import Watchdog

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.002)  # another thread runs meanwhile

async def made():
    return Watchdog(socket.socketpair()[0])

def nap():
    time.sleep(0.0005)
def nap_on():
    while True:
        nap()
def come_and_go():
    while True:
        thread = threading.Thread(target=nap)
        thread.start()
        thread.join()

watchdog = asyncio.run(made())
gc.disable()
for target in [nap_on] * 8 + [come_and_go] * 2:
    threading.Thread(target=target, daemon=True).start()
for _ in range(300):
    Cycle()
    gc.set_threshold(gc.get_count()[0] + 4)  # the next collection comes when a few frames are made
    gc.enable()
    watchdog._running_handle()
    gc.disable()
    time.sleep(0.001)
os._exit(0)
"""


def test_a_look_while_threads_come_and_go_and_garbage_is_collected_ends() -> None:
    subprocess.run([sys.executable, "-c", LOOKS, *sys.path], check=True, timeout=120.0)


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="Linux that counts run delays")
def test_a_thread_that_shares_its_processor_is_starved() -> None:
    """Two programs on one processor: each of them waits for about half of the time."""
    code = (
        "import os, sys, threading, time; sys.path[:0] = sys.argv[1:];"
        "from meshrl.rollout.workers.watchdog import starved_s;"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "end = time.monotonic() + 60;"
        "\nwhile (found := starved_s(threading.get_native_id())) < 0.2 and time.monotonic() < end: pass"
        "\nprint(found)"
    )
    pair = [
        subprocess.Popen([sys.executable, "-c", code, *sys.path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert all(float(one.communicate(timeout=120)[0]) >= 0.2 for one in pair)


def test_where_it_is_not_counted_nothing_is_starved() -> None:
    assert starved_s(-1) == 0.0
