"""The pace of a healthy environment beside a bad one with a share of 0.2, one kind of bad after the other.

    python tests/benchmarks/bench_bad_environments.py                 # all kinds, about 25 s each
    python tests/benchmarks/bench_bad_environments.py --kinds dies blocks --seconds 30

Starts the `rollout` program with a healthy environment and one of each kind, and plays in turns: the healthy one alone,
both for a while in which the service may find out (`finding out`), both, and the healthy one alone again. The engine
answers after --delay seconds, so that the pace hangs on the service and not on the processor. Four of five rollouts in
flight are the healthy one's. The table has rollouts a second of the healthy one as a share of its pace alone: while it
is found out, after that, and over both (`beside`); and what the bad one's rollouts ended in. At the end the program is
asked to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

from aiohttp import web
from rollout_paths import save_tokenizer

from meshrl.client import RolloutClient
from meshrl.core.readiness import READY_FILE
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Rollout, RolloutFailure, RolloutRequest, RolloutSummary

TASKSETS = Path(__file__).parents[1] / "contract" / "rollout" / "tasksets"
KINDS = (
    "raises", "nan", "none", "text", "blocks", "spins", "hangs", "dies", "exits", "exits in a task", "cancels",
    "grows", "huge", "slow",
)  # fmt: skip
START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 120.0
REPLY = [5, 6, 7]


async def engine(delay_s: float) -> tuple[web.AppRunner, str]:
    """A stand-in that samples three tokens after `delay_s`."""

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in REPLY]
        choice = {"index": 0, "token_ids": REPLY, "finish_reason": "length", "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": 0, "logprobs_mode": "processed_logprobs"})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/version", version)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


class Stream:
    """Keeps groups of one rollout of an environment in flight, and counts what they end in."""

    def __init__(self, client: RolloutClient, environment: str, in_flight: int) -> None:
        self.ended: list[float] = []  # time.monotonic of each finished rollout
        self.words: Counter[str] = Counter()
        self._client = client
        self._environment = environment
        self._next = 0
        self._tasks = [asyncio.create_task(self._keep_going()) for _ in range(in_flight)]

    async def _keep_going(self) -> None:
        while True:
            self._next += 1
            request = RolloutRequest(
                request_id=str(uuid.uuid4()),
                group_id=str(uuid.uuid4()),
                environment=self._environment,
                task_index=self._next % 1000,
                group_size=1,
                deadline_s=120.0,
            )
            try:
                async for event in self._client.run_rollouts(request):
                    if isinstance(event, Rollout):
                        self.ended.append(time.monotonic())
                        self.words["finished"] += 1
                    elif isinstance(event, RolloutFailure):
                        self.words[re.sub(r"[\d.]+(?= s\b| MiB)", "N", f"{event.reason}: {event.message}")] += 1
                    elif isinstance(event, RolloutSummary) and event.cancelled:
                        self.words["cancelled"] += 1
            except MeshError as error:
                self.words[f"refused: {error}"] += 1
                await asyncio.sleep(0.2)

    def pace(self, since_s: float, until_s: float) -> float:
        return sum(since_s <= at < until_s for at in self.ended) / (until_s - since_s)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def started(folder: Path, options: argparse.Namespace, url: str) -> tuple[asyncio.subprocess.Process, int]:
    """The rollout program, once it serves, and its port."""
    save_tokenizer(folder, 300)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    entries = ['[[env]]\nid = "mesh_zoo"\nname = "healthy"']
    for kind in options.kinds:
        wrong = f'args = {{ kind = "{kind}", seconds = 20.0 }}'
        deadlines = "deadlines = { scoring_s = 5.0, blocked_s = 10.0 }"
        entries.append(f'[[env]]\nid = "mesh_zoo"\nname = "{kind}"\n{wrong}\n{deadlines}')
    config = folder / "rollout.toml"
    config.write_text(
        f'tokenizer = "{folder}"\noutput_dir = "{folder}/out"\nworkers = {options.workers!r}\nmax_memory_mib = 1024\n'
        f"standby = {str(options.standby).lower()}\n"
        f'[sampling]\nmax_tokens = 3\n[server]\nport = {port}\n[client]\nbase_url = ["{url}"]\n'
        '[renderer]\nname = "default"\n' + "\n".join(entries)
    )
    ready = folder / "ready"
    environ = {**os.environ, READY_FILE: str(ready), "PYTHONPATH": f"{TASKSETS}:{os.environ.get('PYTHONPATH', '')}"}
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshrl.rollout.main", "@", str(config), env=environ,
        stdout=(folder / "rollout.log").open("wb"), stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(START_DEADLINE_S):
        while not ready.exists():  # another process makes it
            if program.returncode is not None:
                raise SystemExit((folder / "rollout.log").read_text()[-2000:])
            await asyncio.sleep(0.1)
    return program, port


async def measure(client: RolloutClient, kind: str, options: argparse.Namespace) -> str:
    """A line of the table."""
    healthy = Stream(client, "healthy", options.in_flight * 4 // 5)
    await asyncio.sleep(2.0)
    marks = [time.monotonic()]

    async def phase(seconds: float) -> float:
        await asyncio.sleep(seconds)
        marks.append(time.monotonic())
        return healthy.pace(*marks[-2:])

    alone = await phase(options.seconds / 2)
    bad = Stream(client, kind, options.in_flight // 5)
    finding = await phase(options.seconds)
    after = await phase(options.seconds)
    beside = (finding + after) / 2
    await bad.end()
    marks.append(time.monotonic())
    alone = (alone + await phase(options.seconds / 2)) / 2
    await healthy.end()
    words = "; ".join(f"{count} x {what}" for what, count in bad.words.most_common(2)) or "none has ended"
    failures = Counter({what: count for what, count in healthy.words.items() if what != "finished"})
    words += "".join(f"; of the healthy one {count} x {what}" for what, count in failures.most_common())
    shares = " | ".join(f"{part / alone:.2f}" if alone else "-" for part in (finding, after, beside))
    return f"| {kind} | {alone:.1f} | {shares} | {failures.total()} | {words} |"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part of a measurement")
    parser.add_argument("--in-flight", type=int, default=10, help="rollouts in flight, the bad one's included")
    parser.add_argument("--delay", type=float, default=0.5, help="seconds that a model call takes")
    parser.add_argument("--workers", default="auto", type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--standby", action=argparse.BooleanOptionalAction, default=True, help="as rollout.standby")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runner, url = await engine(options.delay)
        program, port = await started(folder, options, url)
        print("| bad one | alone, rollouts/s | finding out | after | beside | healthy failed | what the bad one says |")
        print("|---|---|---|---|---|---|---|", flush=True)
        try:
            async with RolloutClient(f"127.0.0.1:{port}") as client:
                for kind in options.kinds:
                    print(await measure(client, kind, options), flush=True)
        finally:
            began_s = time.monotonic()
            program.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(program.wait(), STOP_DEADLINE_S)
            print(f"\nthe program ended with exit code {code} after {time.monotonic() - began_s:.1f} s; its log:")
            print("\n".join((folder / "rollout.log").read_text().splitlines()[-40:]))
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
