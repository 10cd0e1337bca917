"""Rollouts a second of the whole `rollout` program and its worker processes, with engines that answer at once.

    python tests/benchmarks/bench_workers.py --workers 1 2
    python tests/benchmarks/bench_workers.py --workers 4 8 11 --engines 3 --clients 2 --in-flight 512 2000

Starts engines (as in `bench_rollouts --instant`) and clients in processes of their own and, for each number of workers,
the program with single-turn episodes of random letters. Clients take groups over gRPC and read which message came, no
more. CPU is that of the program's front process and of its workers, for each rollout; engines' CPU for each model call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))

from local_ports import free_port
from rollout_load import Process
from rollout_paths import TEMPLATE_TOKENS, save_tokenizer

HERE = Path(__file__).parent
START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 60.0
VOCAB_SIZE = 300
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def run_engine(pipe: Connection, tokenizer: str, tokens: int) -> None:
    """An engine's process: says its URL, ends when it is told to."""
    from transformers import AutoTokenizer

    from bench_rollouts import InstantEngine, serve

    async def main() -> None:
        async with AsyncExitStack() as stack:
            loaded = AutoTokenizer.from_pretrained(tokenizer)
            pipe.send(await serve(InstantEngine(max(tokens, 4096), VOCAB_SIZE, loaded), "instant", loaded, stack))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


def run_client(pipe: Connection, address: str, group_size: int) -> None:
    """A client's process: plays as many groups as it is told, so many at once; says when it began and ended."""

    async def main() -> None:
        import grpc.aio

        from meshrl.v1 import rollout_pb2 as pb
        from meshrl.v1 import rollout_pb2_grpc as pb_grpc
        from meshrl.wire import convert
        from meshrl.wire.types import RolloutRequest

        async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
            stub = pb_grpc.RolloutServiceStub(channel)

            async def group(task_index: int) -> None:
                request = RolloutRequest(
                    request_id=str(uuid.uuid4()),
                    group_id=str(uuid.uuid4()),
                    environment="bench_words",
                    task_index=task_index,
                    group_size=group_size,
                    deadline_s=600.0,
                )
                message: pb.RunRolloutsResponse
                async for message in stub.RunRollouts(convert.to_proto(request)):
                    if message.HasField("failure"):
                        raise RuntimeError(f"a rollout failed: {message.failure.message}")
                    if message.HasField("summary") and message.summary.finished != group_size:
                        raise RuntimeError(f"{message.summary.finished} rollouts of {group_size} finished")

            async def keep_going(numbers: Iterator[int]) -> None:
                for number in numbers:
                    await group(number % 100)

            while (order := await asyncio.to_thread(pipe.recv)) is not None:
                groups, at_once = order
                numbers, began_s = iter(range(groups)), time.time()
                try:
                    async with asyncio.TaskGroup() as playing:
                        for _ in range(at_once):
                            playing.create_task(keep_going(numbers))
                    pipe.send((began_s, time.time()))
                except BaseExceptionGroup as broken:
                    pipe.send(repr(broken.exceptions[0]))

    asyncio.run(main())


@contextmanager
def program(folder: Path, workers: int, engines: list[str], options: argparse.Namespace) -> Any:
    """The `rollout` program, once it serves: its process and address."""
    from meshrl.core.program import READY_FILE

    port = free_port()
    own = folder / f"workers_{workers}"
    own.mkdir()
    characters = max(1, options.prompt_tokens - TEMPLATE_TOKENS)
    urls = ", ".join(f'"{url}"' for url in engines)
    (own / "rollout.toml").write_text(
        f'tokenizer = "{folder}"\noutput_dir = "{own}/out"\nworkers = {workers}\nmax_concurrent = 65536\n'
        f"max_queued = 65536\nseq_len = {2 * options.prompt_tokens + options.new_tokens}\n"
        f'[model]\nname = "instant"\n[renderer]\nname = "default"\n[sampling]\nmax_tokens = {options.new_tokens}\n'
        f'[server]\nport = {port}\n[client]\nbase_url = [{urls}]\nlogprobs_mode = "processed_logprobs"\n'
        f'[[env]]\nid = "bench_words"\nargs = {{ characters = {characters} }}\n'
    )
    paths = os.pathsep.join(filter(None, [str(HERE / "tasksets"), os.environ.get("PYTHONPATH")]))
    ready = own / "ready"
    command = [sys.executable, "-m", "meshrl.rollout.main", "@", str(own / "rollout.toml")]
    with (own / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths, READY_FILE: str(ready)}, stdout=log, stderr=log
        )
    try:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not ready.exists():  # another process makes it
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit((own / "log").read_text()[-3000:])
            time.sleep(0.1)
        yield process, f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_s(root: int) -> tuple[float, float]:
    """CPU seconds of a process, and of all that descend from it."""
    used: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        used[pid] = (int(fields[11]) + int(fields[12])) * TICK_S
        children[int(fields[1])].append(pid)
    found, below = list(children[root]), 0.0
    while found:
        pid = found.pop()
        below += used[pid]
        found += children[pid]
    return used.get(root, 0.0), below


async def measure(
    front: int, clients: list[Process], engines: list[Process], in_flight: int, options: argparse.Namespace
) -> str:
    """The cells of a line: rollouts a second, and CPU milliseconds of the front, the workers and the engines."""
    at_once = max(1, in_flight // options.group_size // len(clients))

    async def load(groups: int) -> list[tuple[float, float]]:
        for client in clients:
            client.pipe.send((groups, at_once))
        return await asyncio.gather(*(client.answer() for client in clients))

    await load(2 * at_once)  # what loads at the first is in nobody's row
    groups = max(2 * at_once, options.rollouts // options.group_size // len(clients))
    before = [cpu_s(pid) for pid in (front, *(engine.pid for engine in engines))]
    times = await load(groups)
    after = [cpu_s(pid) for pid in (front, *(engine.pid for engine in engines))]
    made = groups * options.group_size * len(clients)
    rate = made / (max(ended for _, ended in times) - min(began for began, _ in times))
    costs = [after[0][0] - before[0][0], after[0][1] - before[0][1]]
    costs.append(sum(late[0] - early[0] for early, late in zip(before[1:], after[1:], strict=True)))
    return f"{rate:,.0f} | " + " | ".join(f"{1e3 * cost / made:.2f}" for cost in costs)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[512], help="rollouts under way")
    parser.add_argument("--rollouts", type=int, default=4000, help="rollouts of a measurement, at least")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--engines", type=int, default=1, help="engine processes")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        save_tokenizer(folder, VOCAB_SIZE)
        tokens = 2 * options.prompt_tokens + options.new_tokens
        engines = [Process(run_engine, name, tokens) for _ in range(options.engines)]
        for engine in engines:
            stack.callback(engine.close)
        urls = [await engine.answer() for engine in engines]
        print(f"{options.prompt_tokens} tokens in, {options.new_tokens} out, groups of {options.group_size}")
        print("| workers | in flight | rollouts/s | front CPU ms | workers' CPU ms | engines' CPU ms |")
        print("|---|---|---|---|---|---|", flush=True)
        for workers in options.workers:
            with program(folder, workers, urls, options) as (process, address), ExitStack() as ending:
                clients = [Process(run_client, address, options.group_size) for _ in range(options.clients)]
                for client in clients:
                    ending.callback(client.close)
                for in_flight in options.in_flight:
                    cells = await measure(process.pid, clients, engines, in_flight, options)
                    print(f"| {workers} | {in_flight} | {cells} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
