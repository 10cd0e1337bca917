"""Publish, prepare, pause and lag of a weight version over both transports, beside the medium that carries it.

Three processes as in a run: this one publishes and activates, the `weights` program is the hub, and one more holds an
engine and its agent. The medium's own time: for filesystem, writing the bytes to a file there and reading them back;
for stream, sending them through two TCP sockets on loopback one after the other (publisher to hub, hub to engine).

    python tests/benchmarks/bench_weights.py [--sizes 1.5 100] [--repeat 5] [--dir /dev/shm]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import torch
from loguru import logger
from torch import nn

from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.inference.agent import WeightAgent
from meshrl.inference.config import InferenceConfig
from meshrl.inference.engine import GenerateRequest, TokenChunk
from meshrl.inference.live_weights import LiveWeights, Shadow
from meshrl.models.state import hf_state
from meshrl.trainer.publisher import Publisher
from meshrl.wire.types import Transport

START_DEADLINE_S = 60.0
TENSORS = 24


class Weights(nn.Module):
    """`millions` million float32 parameters in equal matrices."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        side = int((millions * 1e6 / TENSORS) ** 0.5)
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(side, side)) for _ in range(TENSORS)])


class IdleEngine:
    """The embedded engine's own weights behind the Engine protocol, with no requests: what is left is the sync."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = LiveWeights(model)
        self._shadow: Shadow | None = None
        self.version: int | None = None
        self.root: bytes | None = None
        self.paused = False
        self.unfit: str | None = None
        self.in_flight = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        raise RuntimeError("this engine only holds weights")
        yield  # makes it a generator

    async def pause(self) -> int:
        self.paused = True
        return 0

    async def resume(self) -> None:
        self.paused = False

    async def stage(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._shadow = await asyncio.to_thread(self._weights.stage, version, tensors)

    async def apply(self, version: int, root: bytes) -> None:
        assert self._shadow is not None
        self._weights.swap(self._shadow)
        self.version, self.root, self._shadow = version, root, None

    async def adopt(self, version: int, root: bytes) -> None:
        self.version, self.root = version, root

    def layout(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        return self._weights.layout

    async def weights_root(self) -> bytes:
        return await asyncio.to_thread(self._weights.root)


async def run_engine(address: str, millions: float) -> None:
    """The engine process: follows the hub until its standard input closes."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)), daemon=True).start()
    async with WeightSyncClient(address) as client:
        agent = WeightAgent(client, IdleEngine(Weights(millions)), InferenceConfig(engine_id="bench"), "127.0.0.1:1")
        await agent.run(stop)


def file_medium_s(num_bytes: int, folder: Path) -> float:
    """Seconds to write and read back a file of `num_bytes`."""
    data, path = os.urandom(2**20) * (num_bytes // 2**20 + 1), folder / "medium"
    buffer = bytearray(num_bytes)
    began_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        view = memoryview(data)[:num_bytes]
        while view:
            view = view[file.write(view[: 2**22]) :]
    with path.open("rb", buffering=0) as file:
        file.readinto(buffer)
    seconds = time.perf_counter() - began_s
    path.unlink()
    return seconds


def socket_medium_s(num_bytes: int) -> float:
    """Seconds to move `num_bytes` through a TCP socket on loopback, twice."""

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as out:
            piece = bytes(2**21)
            for at in range(0, num_bytes, len(piece)):
                out.sendall(piece[: num_bytes - at])

    seconds = 0.0
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = threading.Thread(target=send, args=(server.getsockname()[1],))
            began_s = time.perf_counter()
            sender.start()
            buffer = bytearray(2**21)
            with server.accept()[0] as incoming:
                while incoming.recv_into(buffer):
                    pass
            sender.join()
            seconds += time.perf_counter() - began_s
    return seconds


def start_hub(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Starts the `weights` program on a free port; returns it and its address."""
    command = [sys.executable, "-c", "from meshrl.weights.main import main; main()"]
    log = folder / "hub.out"
    with log.open("wb") as out:
        hub = subprocess.Popen([*command, "--output-dir", str(folder), "--server.port", "0"], stdout=out, stderr=out)
    end_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end_s:
        found = re.search(r"serving WeightSync at (\S+:\d+)", log.read_text())
        if found:
            return hub, found[1]
        if hub.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the hub did not start: {log.read_text()}")


def start_engine(address: str, millions: float) -> subprocess.Popen[bytes]:
    """Starts a process with an engine and its agent."""
    command = [sys.executable, __file__, "--engine", address, "--sizes", str(millions)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def measure(transport: Transport, millions: float, repeat: int, folder: Path) -> dict[str, float | str]:
    """Publishes and activates `repeat` versions after one to warm up; returns medians."""
    hub, address = start_hub(folder)
    engine = start_engine(address, millions)
    model = Weights(millions)
    rows: dict[str, list[float]] = {}
    try:
        async with WeightSyncClient(address, ChannelOptions()) as client:
            publisher = Publisher(
                client, run_id="bench", epoch=1, transport=transport, broadcast_dir=folder / "broadcasts"
            )
            num_bytes = 0
            for version in range(repeat + 1):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.normal_()
                began_s = time.perf_counter()
                report = await publisher.publish(version, hf_state(model))
                activation = await client.activate_version(
                    run_id="bench", version=version, prepare_deadline_s=START_DEADLINE_S
                )
                total_s = time.perf_counter() - began_s
                num_bytes = report.num_bytes
                if version:
                    applied = activation.engines[0].applied
                    row = {
                        "publish_s": report.seconds,
                        "prepare_s": applied.prepare_s,
                        "pause_s": applied.pause_s,
                        "commit_s": activation.commit_s,
                        "lag_s": activation.lag_s,
                        "total_s": total_s,
                    }
                    for name, value in row.items():
                        rows.setdefault(name, []).append(value)
    finally:
        for process in (engine, hub):
            process.terminate()
        for process in (engine, hub):
            process.wait(10)
    medium_s = min(
        file_medium_s(num_bytes, folder) if transport is Transport.FILESYSTEM else socket_medium_s(num_bytes)
        for _ in range(3)
    )
    result: dict[str, float | str] = {name: statistics.median(values) for name, values in rows.items()}
    total_s = statistics.median(rows["total_s"])
    return {
        "transport": transport.value,
        "params_millions": millions,
        "bytes": num_bytes,
        **result,
        "medium_s": medium_s,
        "of_medium": medium_s / total_s,
        "gb_per_s": num_bytes / total_s / 1e9,
    }


COLUMNS = (
    ("transport", "{:<11}"),
    ("params_millions", "{:>6.1f}M"),
    ("publish_s", "{:>9.4f}"),
    ("prepare_s", "{:>9.4f}"),
    ("pause_s", "{:>9.5f}"),
    ("commit_s", "{:>9.4f}"),
    ("lag_s", "{:>9.4f}"),
    ("total_s", "{:>9.4f}"),
    ("gb_per_s", "{:>8.2f}"),
    ("medium_s", "{:>9.4f}"),
    ("of_medium", "{:>9.2f}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.5, 100.0], help="millions of float32 parameters")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/weights.json"))
    parser.add_argument("--dir", type=Path, help="where the hub and the files go; by default the temporary folder")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logger.disable("meshrl")  # the table is the output
    if options.engine:
        asyncio.run(run_engine(options.engine, options.sizes[0]))
        return
    results = []
    heads = [f"{name:>{len(text.format(0.0) if name != 'transport' else text.format(''))}}" for name, text in COLUMNS]
    print("  ".join(heads))
    for millions in options.sizes:
        for transport in (Transport.FILESYSTEM, Transport.STREAM):
            with tempfile.TemporaryDirectory(prefix="meshrl-bench-", dir=options.dir) as folder:
                result = asyncio.run(measure(transport, millions, options.repeat, Path(folder)))
            print("  ".join(text.format(result[name]) for name, text in COLUMNS), flush=True)
            results.append(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"cores": os.cpu_count(), "torch": torch.__version__, "results": results}, indent=2)
    )
    print(f"medians of {options.repeat}; total = publish + activate; of_medium = medium_s / total_s -> {options.out}")


if __name__ == "__main__":
    main()
