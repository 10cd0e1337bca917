"""What the landing of one run's adapter costs the other runs: gaps between streamed tokens, with landings and without.

    python tests/benchmarks/bench_adapters.py [--shape tests/benchmarks/shapes/qwen3-4b] [--adapters 8] [--streams 64]
                                              [--seconds 15] [--engine vllm --engine-python PYTHON]

One engine with random weights serves an adapter for each run, and each run has its share of steady streams. In turns
nothing lands, or a version of the last run lands every --every seconds. The table has the gaps of the other runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_load import is_healthy
from meshrl.machine.ports import bound, port_of
from meshrl.versions.peft import config_table, write_folder
from meshrl.wire.types import AdapterConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
START_S = 300.0
PROMPT_TOKENS = 64
VERSIONS = 2  # folders of the run whose versions land


def sizes_of(shape: Path) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear layer of a shape's blocks."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape))
    found = {name: layer for name, layer in model.named_modules() if name.rpartition(".")[2] in TARGETS}
    return {name: (layer.in_features, layer.out_features) for name, layer in found.items()}


def adapter_folder(sizes: dict[str, tuple[int, int]], folder: Path, *, rank: int, seed: int) -> Path:
    """A random adapter on these layers, in PEFT's form."""
    source, tensors = torch.Generator().manual_seed(seed), {}
    for name, (inputs, outputs) in sizes.items():
        for part, size in {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}.items():
            values = torch.randn(size, generator=source) * 0.01
            tensors[f"base_model.model.{name}.{part}.weight"] = values.to(torch.bfloat16)
    write_folder(folder, tensors, config_table(AdapterConfig(rank=rank, lora_alpha=2.0 * rank, target_modules=TARGETS)))
    return folder


class Gaps:
    """Seconds between the tokens of streams, by run, while `on`."""

    def __init__(self, runs: int) -> None:
        self.on = False
        self.of: list[list[float]] = [[] for _ in range(runs)]

    def clear(self) -> None:
        self.of = [[] for _ in self.of]


async def stream(http: aiohttp.ClientSession, url: str, run: int, place: int, gaps: Gaps, tokens: int) -> None:
    """Streams completions of a run without end."""
    number = 0
    while True:
        number += 1
        prompt = [5 + (place * 7 + number * 13 + token) % 200 for token in range(PROMPT_TOKENS)]
        body = {"model": f"run{run}", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"the engine answered {answer.status}: {await answer.text()}")
            last = None
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if last is not None and gaps.on:
                    gaps.of[run].append(now - last)
                last = now


async def land(http: aiohttp.ClientSession, url: str, run: int, folder: Path, version: int) -> float:
    """Loads a version of a run's adapter; returns the seconds that it took."""
    began = time.perf_counter()
    body = {"lora_name": f"run{run}", "lora_path": str(folder), "version": version}
    async with http.post(f"{url}/load_lora_adapter", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"run{run} was not loaded ({answer.status}): {await answer.text()}")
    return time.perf_counter() - began


async def measure(arguments: argparse.Namespace, url: str, folders: list[Path]) -> list[float]:
    """Prints a row for each turn; returns their p99."""
    runs = arguments.adapters
    gaps, p99s = Gaps(runs), []
    print(f"{'landings':<16}{'number':>8}{'load ms':>9}{'tokens/s':>10}{'p50':>8}{'p99':>8}{'p99.9':>8}{'max':>8}")
    timeout, connector = aiohttp.ClientTimeout(total=None, sock_read=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        for run in range(runs):
            await land(http, url, run, folders[run], 0)
        streams = [
            asyncio.create_task(stream(http, url, place % runs, place, gaps, arguments.tokens))
            for place in range(arguments.streams)
        ]
        version = 0
        try:
            await asyncio.sleep(arguments.warm_up_s)
            for turn in range(2 * arguments.rounds):
                landing = turn % 2 == 1
                gaps.clear()
                gaps.on, took, ends = True, [], time.perf_counter() + arguments.seconds
                while (left := ends - time.perf_counter()) > 0:
                    if landing:
                        version += 1
                        took.append(await land(http, url, runs - 1, folders[runs - 1 + version % VERSIONS], version))
                    if any(each.done() for each in streams):
                        await asyncio.gather(*streams)
                    await asyncio.sleep(max(0.0, min(arguments.every - (took[-1] if took else 0.0), left)))
                gaps.on = False
                others = np.array([gap for of_run in gaps.of[:-1] for gap in of_run]) * 1e3
                shown = [float(value) for value in (*np.percentile(others, [50, 99, 99.9]), others.max())]
                p99s.append(shown[1])
                print(
                    f"{f'one in {arguments.every:g} s' if landing else 'none':<16}{len(took):>8}"
                    f"{float(np.mean(took)) * 1e3 if took else 0.0:>9.0f}"
                    f"{sum(map(len, gaps.of)) / arguments.seconds:>10,.0f}"
                    + "".join(f"{value:>8.1f}" for value in shown),
                    flush=True,
                )
        finally:
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return p99s


def model_folder(arguments: argparse.Namespace, folder: Path) -> Path:
    """The model that the engine loads: the shape, whose weights vLLM makes up, or a model's folder as it is."""
    shutil.copytree(arguments.shape, folder)
    if not list(folder.glob("tokenizer*")):
        from rollout_paths import save_tokenizer  # of a shape without one

        save_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
    return folder


def bench(arguments: argparse.Namespace, folder: Path) -> None:
    model = model_folder(arguments, folder / "model")
    count, sizes = arguments.adapters - 1 + VERSIONS, sizes_of(model)
    folders = [adapter_folder(sizes, folder / f"adapter{n}", rank=arguments.rank, seed=n) for n in range(count)]
    socket = bound("127.0.0.1", shared=True)
    url = f"http://127.0.0.1:{port_of(socket)}"
    flags = [
        "--model.name", str(model), "--server.port", str(port_of(socket)), "--output-dir", str(folder / "out"),
        "--engine", arguments.engine, "--max-model-len", str(PROMPT_TOKENS + arguments.tokens + 8),
        "--lora-rank", str(arguments.rank), "--max-loras", str(2 * arguments.adapters),
    ]  # fmt: skip
    if arguments.engine == "vllm":
        flags += ["--model.dtype", "bfloat16", "--vllm.load_format", "dummy", "--max-num-seqs", str(arguments.streams)]
    with (folder / "engine.out").open("wb") as out:
        engine = subprocess.Popen(
            [arguments.engine_python, "-m", "meshrl.inference.main", *flags, *arguments.engine_flag],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    began = time.perf_counter()
    try:
        wait_until_healthy(url, engine)
        size = sum(each.stat().st_size for each in folders[0].iterdir()) / 2**20
        print(
            f"{arguments.adapters} adapters of rank {arguments.rank} ({size:.1f} MiB), {arguments.streams} streams,"
            f" {arguments.engine}, up after {time.perf_counter() - began:.0f} s; gaps between tokens of the runs that"
            " nothing lands for, in ms",
            flush=True,
        )
        p99s = asyncio.run(measure(arguments, url, folders))
        lines = (folder / "engine.out").read_text(errors="replace").splitlines()
        print(*[line for line in lines if "is loaded" in line][-3:], sep="\n", flush=True)
    except BaseException:
        sys.stderr.write((folder / "engine.out").read_text(errors="replace")[-3000:])
        raise
    finally:
        engine.terminate()
        try:
            engine.wait(30)
        except subprocess.TimeoutExpired:
            engine.kill()
    without, with_ = (float(np.median(p99s[place::2])) for place in (0, 1))
    print(f"p99 with landings over without: {with_ / without:.2f} (medians of {arguments.rounds} turns)")


def wait_until_healthy(url: str, engine: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START_S
    while not is_healthy(url):
        if engine.poll() is not None or time.monotonic() > ends:
            raise SystemExit("the engine is not up")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "shapes" / "qwen3-4b")
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--engine-flag", action="append", default=[], help="a flag of `inference`; repeatable")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each completion")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between landings")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns without and with landings")
    parser.add_argument("--warm-up-s", type=float, default=5.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the engine ends as well
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/dev/shm")) as folder:
        bench(arguments, Path(folder))


if __name__ == "__main__":
    main()
