"""Two engines of which one is stopped half of the time: which of them model calls go to, and how long a burst takes.

    python tests/benchmarks/bench_engine_rates.py --model outputs/demo/sft/weights/final --beside ../before

Embedded engines as programs, and the rollout service's own router, which is given bursts of calls as the groups of a
step are. With `--beside` another checkout's router takes turns with this one. The first burst of each turn, in which
the router learns what the engines make, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from meshrl.rollout.config import ClientConfig
from meshrl.rollout.engines.answers import read
from meshrl.rollout.engines.engine_table import EngineTable, Requirement
from meshrl.rollout.engines.router import EngineRouter
from meshrl.rollout.engines.sessions import Session

sys.path.append(str(Path(__file__).parents[1] / "support"))
from local_ports import free_port

START_S, TURN_S = 300.0, 600.0
HALF_S = 0.02


class HalfOfTheTime:
    """Stops a process for half of the time, in turns of 20 ms."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._over.is_set():
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(self._pid, signum)
                time.sleep(HALF_S)

    def end(self) -> None:
        self._over.set()
        time.sleep(3 * HALF_S)


def start_engine(model: Path, folder: Path, stack: ExitStack) -> tuple[str, int]:
    """An engine's address and process id."""
    port = free_port()
    command = [
        sys.executable, "-m", "meshrl.inference.main", "--engine", "embedded", "--model.name", str(model),
        "--max-model-len", "256", "--max-num-seqs", "64", "--torch-threads", "1", "--server.port", str(port),
        "--output-dir", str(folder / str(port)),
    ]  # fmt: skip
    with (folder / f"{port}.txt").open("wb") as console:
        engine = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    stack.callback(lambda: (engine.kill(), engine.wait(60.0)))
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and engine.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return f"http://127.0.0.1:{port}", engine.pid
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit((folder / f"{port}.txt").read_text()[-3000:])


async def load(urls: list[str], model: str, calls: int, bursts: int, tokens: int) -> None:
    """Bursts of calls; says how many went where and how long each burst took."""
    random = np.random.default_rng(0)
    table = EngineTable(urls)
    async with EngineRouter(table, ClientConfig(base_url=urls)) as router:

        async def one(number: int) -> str:
            session = Session()
            params = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
            prompt = random.integers(5, 200, 16).tolist()
            body = json.dumps({"model": model, "token_ids": prompt, "sampling_params": params}).encode()
            answer = await router.generate(session, f"call-{number}", body, Requirement())
            sampled = read(answer)
            assert session.engine is not None
            if hasattr(table, "sampled") and answer.timing is not None:  # the checkout beside may lack it
                table.sampled(session.engine, answer.timing, len(sampled.token_ids))
            return session.engine

        for burst in range(bursts + 1):
            began_s = time.monotonic()
            had = Counter(await asyncio.gather(*(one(number) for number in range(calls))))
            told = {"seconds": time.monotonic() - began_s, "calls": [had[url] for url in urls]}
            if burst:
                print(json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--calls", type=int, default=96, help="of a burst")
    parser.add_argument("--bursts", type=int, default=3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a call")
    parser.add_argument("--urls", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.urls:
        asyncio.run(load(asked.urls, str(asked.model), asked.calls, asked.bursts, asked.tokens))
        return
    codes = {"this": Path(sys.executable)}
    if asked.beside is not None:
        codes = {str(asked.beside): asked.beside / ".venv/bin/python", **codes}
    told: dict[str, list[dict[str, list[int] | float]]] = {code: [] for code in codes}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        engines = [start_engine(asked.model, Path(name), stack) for _ in range(2)]
        slow = HalfOfTheTime(engines[1][1])
        stack.callback(slow.end)
        for _ in range(asked.rounds):
            for code, python in codes.items():
                command = [str(python), __file__, "--model", str(asked.model), "--urls", *(url for url, _ in engines)]
                command += ["--calls", str(asked.calls), "--bursts", str(asked.bursts), "--tokens", str(asked.tokens)]
                said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TURN_S).stdout
                told[code] += [json.loads(line) for line in said.splitlines()]
    print(
        "| code | seconds of a burst | median | calls to the whole engine, to the half | of the half |\n"
        + "|---" * 5
        + "|"
    )
    for code, bursts in told.items():
        whole, half = (sum(burst["calls"][index] for burst in bursts) for index in range(2))
        seconds = [burst["seconds"] for burst in bursts]
        shown = ", ".join(f"{each:.2f}" for each in seconds)
        print(
            f"| {code} | {shown} | {statistics.median(seconds):.2f} | {whole}, {half} | {half / (whole + half):.0%} |"
        )


if __name__ == "__main__":
    main()
