"""Memory of an engine that is started by defaults and takes weight versions under load. Prints a table.

For each shape: a model of random weights, a weight hub, `inference` with nothing set but model and hub, and a publisher
that has three versions served, one after the other, while the engine answers as many requests as it decodes at once.
`free` is what nvidia-smi reports of the card: once the engine serves, and the least while versions land.

    python tests/benchmarks/bench_engine_memory.py --shapes qwen3-0.6b qwen3-4b qwen3-8b --gpu 0
    python tests/benchmarks/bench_engine_memory.py --tiny         # the embedded engine and a small model, on this CPU

What follows `--` goes to the engine, as KEY=VALUE of its TOML.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file

from bench_run import make_model
from engine_load import Load

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from engine_mesh import Program
from local_ports import free_port
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.wire.types import Activation, Transport
from state_publisher import StatePublisher

VERSIONS = 3
WARM_S = 8.0
"""Requests run so long before a version comes, so that caches and allocators are full."""
DEADLINE_S = 240.0
LINE = "{:<12}{:<24}{:>7}{:>7}{:>9}{:>11}{:>10}{:>10}{:>10}{:>10}"


class FreeMemory:
    """The least that was free on a card since `since`, in GiB; nothing on a CPU."""

    def __init__(self, gpu: int | None) -> None:
        self._gpu, self._over = gpu, threading.Event()
        self.seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> FreeMemory:
        if self._gpu is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()

    def least(self, since_s: float) -> float:
        return min((free for at_s, free in self.seen if at_s >= since_s), default=float("nan"))

    def _watch(self) -> None:
        query = ["nvidia-smi", "-i", str(self._gpu), "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        while not self._over.wait(0.2):
            done = subprocess.run(query, capture_output=True, text=True, timeout=30.0)
            if done.returncode == 0:
                self.seen.append((time.monotonic(), int(done.stdout.split()[0]) / 1024))


def card(gpu: int | None) -> str:
    if gpu is None:
        return "CPU"
    query = ["nvidia-smi", "-i", str(gpu), "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, timeout=30.0, check=True).stdout.strip()


async def land(hub: str, state: dict[str, torch.Tensor], folder: Path) -> list[Activation]:
    """Has the versions served one after the other."""
    made = []
    async with WeightSyncClient(hub, ChannelOptions(unary_deadline_s=60.0)) as client:
        publisher = StatePublisher(client, Transport.FILESYSTEM, folder, num_threads=8, chunk_bytes=2**22)
        for version in range(VERSIONS):
            state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], 1.0 + version / 8)
            await publisher.publish(version, state)
            activation = await client.activate_version(run_id="run", version=version, prepare_deadline_s=DEADLINE_S)
            made.append(activation)
            await asyncio.sleep(WARM_S if version < VERSIONS - 1 else 0.0)
        await publisher.close()
    return made


def measure(shape: str | None, gpu: int | None, folder: Path, extra: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = shape or "tiny"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # whose end frees the GPU
        model = pool.submit(make_model, shape, folder / name, ragged=False, mean_tokens=1024).result()
    hub_config = {"server": {"port": free_port()}, "output_dir": str(folder)}
    hub = Program(Path(sys.executable), "meshrl.weights.main", hub_config, folder, f"{name}-weights")
    engine = None
    try:
        address = hub.address(r"serving WeightSync at (\S+)")
        config = {
            "model": {"name": str(model)},
            "output_dir": str(folder),
            "server": {"port": 0},
            "weight_broadcast": {"address": address},
            **extra,
        }
        began_s = time.monotonic()
        engine = Program(Path(sys.executable), "meshrl.inference.main", config, folder, f"{name}-inference")
        url = engine.address(r"on (http://\S+)")
        up_s = time.monotonic() - began_s
        slots = int(re.findall(r"\((\d+) slots of", engine.log.read_text())[-1])
        files = sorted(model.glob("*.safetensors"))
        state = {tensor_name: tensor for file in files for tensor_name, tensor in load_file(file).items()}
        with FreeMemory(gpu) as free:
            time.sleep(1.0)
            at_start = free.least(0.0)
            with Load(int(url.rsplit(":", 1)[1]), slots):
                since_s = time.monotonic()
                activations = asyncio.run(land(address, state, folder / f"{name}-versions"))
            least = free.least(since_s)
        reports = [report.applied for made in activations for report in made.engines]
        shares = re.findall(r"gpu_memory_utilization = ([\d.]+)", engine.log.read_text())
        row = (
            name, card(gpu), slots, shares[-1] if shares else "-", f"{up_s:.0f}", f"{at_start:.2f}", f"{least:.2f}",
            len(reports), f"{max(r.prepare_s for r in reports):.2f}", f"{1000 * max(r.pause_s for r in reports):.0f}",
        )  # fmt: skip
        print(LINE.format(*map(str, row)), flush=True)
    except BaseException:
        print(f"{name}: failed; the engine's log ends with\n{engine.tail() if engine else hub.tail()}", flush=True)
        raise
    finally:
        for line in [] if engine is None else engine.log.read_text(errors="replace").splitlines():
            if re.search(r"GiB|chosen for|staged as|prepared in|is served|OUT_OF_MEMORY|capturing", line):
                print(f"  {name}: {line[-330:]}", flush=True)
        for program in filter(None, (engine, hub)):
            program.stop()
        shutil.rmtree(folder / f"{name}-versions", ignore_errors=True)
        shutil.rmtree(folder / name, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-0.6b", "qwen3-4b", "qwen3-8b"])
    parser.add_argument("--tiny", action="store_true", help="a small model and the embedded engine instead")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("/dev/shm/engine_memory"))
    parser.add_argument("flags", nargs="*", help="KEY=VALUE for the engine")
    options = parser.parse_args()
    extra = {key: json.loads(value) for key, value in (flag.split("=", 1) for flag in options.flags)}
    gpu = None if options.tiny else options.gpu
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    head = ("shape", "card", "slots", "share", "start s", "free GiB", "least", "versions", "prepare s", "pause ms")
    print(LINE.format(*head), flush=True)
    for shape in [None] if options.tiny else options.shapes:
        measure(shape, gpu, options.output_dir / f"gpu{options.gpu}", extra)


if __name__ == "__main__":
    main()
