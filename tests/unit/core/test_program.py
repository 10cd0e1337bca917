"""How a program ends: by its own code, by a signal, by an error."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from meshrl.core.config.base import ConfigError
from meshrl.core.program import BLOCKING_THREADS, READY_FILE, how_it_ended, run
from meshrl.core.rpc.serve import is_loopback
from meshrl.wire.errors import MeshError, Reason

SLOW_TO_STOP = """
import asyncio, os, signal, sys
from meshrl.core.program import run

async def main(stop):
    print("up", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(60)
    return 0

sys.exit(run(main))
"""

LOSES_ITS_FOLDER = """
import asyncio, shutil, sys
from pathlib import Path
from loguru import logger
from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import LogConfig
from meshrl.core.program import run_program
from meshrl.core.telemetry import watchdog

watchdog.LOOK_EVERY_S, watchdog.WRITE_EVERY_S = 0.05, 0.1

class Config(BaseConfig):
    output_dir: Path
    log: LogConfig = LogConfig()
    readable_by: str = "owner"

async def serve(config, stop, tracing):
    while not list(config.output_dir.glob("state/*.json")):
        await asyncio.sleep(0.1)
    shutil.rmtree(config.output_dir)
    named = asyncio.Event()
    logger.add(lambda line: "was deleted or moved" in line and named.set())
    await asyncio.wait_for(named.wait(), 60.0)
    print("ends" if stop.is_set() else "serves on", flush=True)
    return 0

run_program(sys.argv[1], Config(output_dir=sys.argv[2]), serve)
"""


@pytest.mark.parametrize(("name", "code", "then"), [("trainer", 1, "ends"), ("inference", 0, "serves on")])
def test_a_program_alone_names_a_lost_output_folder_and_ends_unless_it_keeps_nothing_there(tmp_path, name, code, then):
    command = [sys.executable, "-c", LOSES_ITS_FOLDER, name, str(tmp_path / "out")]
    environ = {key: value for key, value in os.environ.items() if key != READY_FILE}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120.0, env=environ)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"the output folder {tmp_path}/out was deleted or moved while {name} was running; " in done.stdout
    assert done.stdout.splitlines()[-1] == then


def test_the_exit_code_is_what_main_returns():
    async def main(stop):
        assert not stop.is_set()
        return 7

    assert run(main) == 7


def test_blocking_work_has_the_same_number_of_threads_on_every_machine():
    meeting, names = threading.Barrier(BLOCKING_THREADS, timeout=60.0), set()

    def work():
        meeting.wait()  # until that many are here at once
        names.add(threading.current_thread().name)

    async def main(stop):
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4 * BLOCKING_THREADS)))
        return 0

    assert run(main) == 0
    assert len(names) == BLOCKING_THREADS


def test_a_signal_is_logged_and_sets_the_event(said):
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):

        async def main(stop, signum=signum):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(stop.wait(), 60.0)
            return 0

        assert run(main) == 0
        assert any(line.startswith(f"{signum.name}: draining") for line in said)


def test_errors_become_exit_codes():
    def raising(error):
        async def main(stop):
            raise error

        return main

    assert run(raising(ConfigError("set x"))) == 2
    assert run(raising(MeshError(Reason.UNREACHABLE))) == 1
    assert run(raising(RuntimeError("defect"))) == 1


@pytest.mark.parametrize("before", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])  # two: a terminal that closes
def test_a_second_signal_ends_the_process_at_once(before):
    process = subprocess.Popen([sys.executable, "-c", SLOW_TO_STOP], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(before[0])
        assert process.stdout.readline() == b"draining\n"
        for signum in (*before[1:], signal.SIGTERM):
            process.send_signal(signum)
        assert process.wait(timeout=60.0) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


MESSAGES = """
import resource
import grpc
from meshrl.core.program import run

SIZE, COUNT = 2**21, 150
OPTIONS = [("grpc.max_receive_message_length", -1)]

async def send(request, context):
    for _ in range(COUNT):
        yield bytes(SIZE)

async def work(stop):
    server = grpc.aio.server(options=OPTIONS)
    method = grpc.unary_stream_rpc_method_handler(send, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Bytes", {"Send": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        async for message in channel.unary_stream("/test.Bytes/Send", bytes, bytes)(b""):
            pass
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(faults / (COUNT * SIZE / resource.getpagesize()))
    await server.stop(0)
    return 0

run(work)
"""


def test_messages_reuse_the_memory_of_earlier_ones():
    done = subprocess.run([sys.executable, "-c", MESSAGES], capture_output=True, text=True, timeout=100)
    assert float(done.stdout) < 0.4, done.stderr  # page faults a page of the messages; with glibc's own limits 0.7 to 1


def test_loopback_is_told_from_other_addresses():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "", "loopback.example")] == [False] * 5


TOO_FEW = """
import resource, sys
from meshrl.core.program import run

async def main(stop):
    print("up")
    return 0

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.exit(run(main))
"""


def test_a_program_that_may_open_too_few_files_says_so_in_one_line_and_does_not_start():
    done = subprocess.run([sys.executable, "-c", TOO_FEW], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "a process may have 64 open files, and a program needs at least 256" in line
    assert "ulimit -Hn" in line


def test_the_start_of_a_program_raises_the_soft_limit_to_what_is_allowed():
    code = TOO_FEW.replace("(64, 64)", "(64, 512)").replace('print("up")', "print(resource.getrlimit(7)[0])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "512\n"), done.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (-9, "was killed by SIGKILL (9)"),
        (-11, "was killed by SIGSEGV (11)"),
        (-64, "was killed by SIGRTMAX (64)"),
        (None, "still runs"),
    ],
)
def test_exit_codes_in_words(code: int | None, words: str) -> None:
    assert how_it_ended(code) == words
