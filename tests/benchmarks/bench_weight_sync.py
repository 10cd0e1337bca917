"""Lag and pause of a weight version from the trainer's ranks to a serving engine, by transport and model shape.

Everything is the real thing but for the training: the hub, `inference` with its agent under load, and the trainer's own
publishers on ranks that hold float32 weights of the shape (random), sharded as FSDP2 shards them. A version's lag is
from the moment at which the weights have changed to the moment at which every engine serves them.

    python tests/benchmarks/bench_weight_sync.py                                     # a tiny shape on the CPU
    python tests/benchmarks/bench_weight_sync.py --transports stream --changed 0.02      versions as deltas
    python tests/benchmarks/bench_weight_sync.py --shapes small --transports nccl --changed 0.01 --deltas auto,off
    python tests/benchmarks/bench_weight_sync.py --engine vllm --shapes qwen3-4b --trainer-gpus 0 --engine-gpus 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))

import torch
from loguru import logger
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from engine_load import Load, is_healthy
from local_ports import free_port
from meshrl.client import WeightSyncClient
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.core.telemetry.waits import Waits
from meshrl.launch.gpus import visible
from meshrl.trainer.publishing.build import PublishOptions, decide, open_publication
from meshrl.trainer.publishing.snapshots import Snapshotter, open_snapshotter
from meshrl.trainer.ranks.commands import (
    CommandSender,
    PublishSetupCommand,
    SnapshotCommand,
    StopCommand,
    receive_commands,
)
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.wire.text_table import markdown_row, markdown_table
from meshrl.wire.types import ActivationPolicy

ROOT = Path(__file__).resolve().parents[2]
SHAPES = Path(__file__).parent / "shapes"
PARTS = ("snapshot", "encode", "write", "group", "stage", "seal", "wire", "keep")
STEPS = ("take_s", "group_s", "encode_s", "write_s", "stage_s", "seal_s", "prepare_s", "activate_s")
ANCHORS = "anchors"
MADE = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096},
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 32768},
}


# --- the trainer's ranks ---------------------------------------------------------------------------


def build(shape: Path, device: torch.device, parallel: RankGroup) -> torch.nn.Module:
    """Float32 weights of a shape, sharded over the group, on the device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=torch.float32)
    if parallel.mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=parallel.mesh)
        fully_shard(model, mesh=parallel.mesh)
    model.to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    torch.manual_seed(parallel.rank)
    model.initialize_weights()
    return model


@torch.no_grad()
def change(model: torch.nn.Module, share: float) -> None:
    """Something for a new version to bring: a share of the weights is a little larger."""
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if share < 1.0:
            local[torch.rand_like(local) < share] *= 1.01
        else:
            local.mul_(1.01)


def run_rank(args: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parallel = RankGroup.start(os.environ, device=device, dp_replicate=1)
    model = build(Path(args.shape), device, parallel)
    learner = SimpleNamespace(model=model, parallel=parallel, take_up=lambda run: None)
    run = SimpleNamespace(run_id="main", step_done=0)
    own = SimpleNamespace(state=run)
    parts: Any = SimpleNamespace(learner=learner, own=own, compute_dtype=torch.bfloat16, parallel=parallel)
    if parallel.rank:
        snapshotters: list[Snapshotter] = []

        def carry_out(command: Any) -> None:
            if isinstance(command, PublishSetupCommand):
                snapshotters.append(open_snapshotter(command.settings, learner, run, torch.bfloat16))
            elif isinstance(command, SnapshotCommand):
                snapshotters[0].capture(run.step_done)
                run.step_done += 1
                change(model, args.changed)

        receive_commands(parallel, carry_out)
        os._exit(0)
    print(json.dumps(asyncio.run(lead(args, parts))), flush=True)
    os._exit(0)


async def lead(args: argparse.Namespace, parts: Any) -> list[dict[str, float]]:
    """Rank 0: publishes and activates versions; a record of each, the first of which counts for its set-up too."""
    deltas = args.deltas[0]
    broadcast = WeightBroadcastConfig(
        type=args.transport,
        address=args.hub,
        bucket_mib=args.bucket_mib if args.transport == "nccl" else 256,
        deltas="auto" if deltas == ANCHORS else deltas,
        probe_tokens=0,
        host=args.host,
    )
    options = PublishOptions(
        model=TrainerModelConfig(name=args.shape),
        broadcast=broadcast.model_copy(update={"anchor_every": 0}) if deltas == ANCHORS else broadcast,
        output_dir=Path(args.output_dir),
        hub_deadline_s=240.0,
        publish_deadline_s=600.0,
    )
    thread, loop = ThreadPoolExecutor(1), asyncio.get_running_loop()
    commands, records = CommandSender(parts.parallel), []
    async with WeightSyncClient(args.hub) as hub:
        decided = asyncio.run_coroutine_threadsafe(decide(options, parts, hub, args.epoch, Waits()), loop)
        publication, captured = await loop.run_in_executor(
            thread, lambda: open_publication(decided, options, parts, commands, hub, os.environ)
        )

        def next_version() -> Any:
            commands.send(SnapshotCommand(run_id=parts.own.state.run_id))
            parts.own.state.step_done += 1
            return publication.snapshotter.capture(parts.own.state.step_done)

        def settle() -> None:
            change(parts.learner.model, args.changed)
            if parts.parallel.device.type == "cuda":
                torch.cuda.synchronize()

        for version in range(args.steps + 1):
            began_s = time.perf_counter()
            if version:
                captured = await loop.run_in_executor(thread, next_version)
            took_s = time.perf_counter()
            report = await publication.publisher.publish(version, captured)
            published_s = time.perf_counter()
            done = await hub.activate_version(
                run_id=parts.own.state.run_id,
                version=version,
                policy=ActivationPolicy(args.policy),
                prepare_deadline_s=300.0,
            )
            ended_s = time.perf_counter()
            if applied := [engine.applied for engine in done.engines if engine.applied is not None]:
                records.append(
                    {
                        "lag_s": ended_s - began_s,
                        "pause_s": max(each.pause_s for each in applied),
                        "prepare_s": max(each.prepare_s for each in applied),
                        "take_s": took_s - began_s,
                        "publish_s": published_s - took_s,
                        "activate_s": ended_s - published_s,
                        "requests_kept": sum(each.requests_kept for each in applied),
                        "bytes": report.num_bytes,
                        **{f"{part}_s": report.parts_s.get(part, 0.0) for part in PARTS},
                    }
                )
            await loop.run_in_executor(thread, settle)
            await asyncio.sleep(args.interval)
        commands.send(StopCommand())
        await publication.close()
    return records


# --- the whole -------------------------------------------------------------------------------------


class Mesh:
    """The hub and the engines of a shape."""

    def __init__(self, args: argparse.Namespace, shape: Path, folder: Path) -> None:
        self.args, self.folder = args, folder
        folder.mkdir(parents=True)
        self.hub, self.ports = f"127.0.0.1:{free_port()}", [free_port() for _ in range(args.engines)]
        self.shape = folder / "model"
        shutil.copytree(shape, self.shape)
        self.programs = [self._start("weights", [], "--server.port", self.hub.rpartition(":")[2])]
        each = len(args.engine_gpus) // args.engines  # GPUs of an engine
        flags = ["--engine", args.engine, "--model.name", str(self.shape), "--max-model-len", "1024"]
        if args.engine == "vllm":
            flags += ["--model.dtype", "bfloat16", "--vllm.load_format", "dummy", "--max-num-seqs", "128"]
            flags += ["--tensor-parallel-size", str(max(1, each))]
            flags += ["--enforce-eager"] if args.enforce_eager else []
            flags += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)] if args.engine_gpus else []
        else:
            model = build(self.shape, torch.device("cpu"), RankGroup(device=torch.device("cpu")))
            model.bfloat16().save_pretrained(self.shape)
            flags += ["--model.dtype", "bfloat16"]
        for number, port in enumerate(self.ports):
            self.programs.append(
                self._start(
                    "inference", args.engine_gpus[number * each : (number + 1) * each], *flags,
                    "--server.port", str(port), "--weight-broadcast.address", self.hub,
                    python=args.engine_python, log=f"inference-{number}",
                )
            )  # fmt: skip
        end_s = time.monotonic() + 300.0
        while not all(is_healthy(f"http://127.0.0.1:{port}") for port in self.ports):
            ended = any(program.poll() is not None for program in self.programs)
            if ended or time.monotonic() > end_s:
                raise SystemExit(self.last_words())
            time.sleep(0.5)

    def last_words(self) -> str:
        """Of every engine."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("inference-*.out")))

    def _start(
        self, program: str, gpus: list[str], *flags: str, python: str = sys.executable, log: str = ""
    ) -> subprocess.Popen[bytes]:
        environ = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
        command = [python, "-m", f"meshrl.{program}.main", "--output-dir", str(self.folder), *flags]
        with (self.folder / f"{log or program}.out").open("wb") as out:
            return subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def measure(self, transport: str, epoch: int, deltas: str) -> list[dict[str, float]]:
        """Runs the trainer's ranks over one transport; the records of its versions."""
        args, ranks = self.args, max(1, len(self.args.trainer_gpus), self.args.ranks)
        steps = args.stream_steps if transport == "stream" else args.steps
        port = free_port()
        processes = []
        for rank in range(ranks):
            gpus = args.trainer_gpus
            environ = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {"OMP_NUM_THREADS": "1"}),
            }  # fmt: skip
            if ranks == 1:
                for name in ("RANK", "WORLD_SIZE"):
                    environ.pop(name)
            command = [
                sys.executable, __file__, "--rank", "--shape", str(self.shape), "--transport", transport, "--hub",
                self.hub, "--epoch", str(epoch), "--steps", str(steps), "--bucket-mib", str(args.bucket_mib),
                "--policy", args.policy, "--output-dir", str(self.folder), "--deltas", deltas, "--changed",
                str(args.changed), "--interval", str(args.interval),
            ]  # fmt: skip
            out = subprocess.PIPE if rank == 0 else (self.folder / f"rank{rank}-{transport}.out").open("wb")
            errors = (self.folder / f"rank{rank}-{transport}.err").open("wb")
            processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=errors))
        with ExitStack() as loads:
            for each in self.ports:
                loads.enter_context(Load(each, args.load))
            said, _ = processes[0].communicate(timeout=400)
        for process in processes:
            process.wait(60)
        if processes[0].returncode:
            sys.stderr.write((self.folder / f"rank0-{transport}.err").read_text()[-4000:])
            return []
        records: list[dict[str, float]] = json.loads(said.decode().strip().splitlines()[-1])
        return records[1:]

    def close(self) -> None:
        for program in self.programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGTERM)
        for program in self.programs:
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)


def link_gbps() -> float | None:
    """GB/s of a copy from GPU 0 to GPU 1, the medium between trainer and engine."""
    if torch.cuda.device_count() < 2:
        return None
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    times = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.perf_counter() - began_s)
    return source.numel() / min(times) / 1e9


def line_of(shape: str, transport: str, ranks: str, records: list[dict[str, float]], link: float | None) -> str:
    def middle(key: str) -> float:
        return statistics.median(record[key] for record in records)

    moved = middle("bytes") / 1e9
    wire_s = middle("prepare_s")
    share = f"{moved / wire_s / link:.2f}" if link and wire_s else "-"
    fields = [
        shape, transport, ranks, f"{moved:.4f}", f"{middle('lag_s'):.3f}", f"{middle('pause_s') * 1e3:.1f}",
        *[f"{middle(key) * 1e3:.0f}" for key in STEPS],
        f"{moved / wire_s:.1f}" if wire_s else "-", share, f"{middle('requests_kept'):.0f}",
    ]  # fmt: skip
    return markdown_row(fields)


def made_shape(name: str, folder: Path) -> Path:
    config = json.loads((SHAPES / "qwen3-0.6b" / "config.json").read_text())
    config.update(MADE[name], head_dim=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    config.pop("layer_types", None)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split = lambda text: [part for part in text.split(",") if part]  # noqa: E731 - an argparse type
    gpus = lambda text: [visible(os.environ)[int(place)] for place in split(text)]  # noqa: E731 - the same
    parser.add_argument("--shapes", type=split, default=["tiny"], help="folders of benchmarks/shapes, tiny or small")
    parser.add_argument("--transports", type=split, default=["nccl", "filesystem", "stream"])
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--trainer-gpus", type=gpus, default=[])
    parser.add_argument("--engine-gpus", type=gpus, default=[])
    parser.add_argument("--engines", type=int, default=1, help="engines that share the engine GPUs evenly")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a trainer on the CPU")
    parser.add_argument("--steps", type=int, default=4, help="versions measured")
    parser.add_argument("--stream-steps", type=int, default=2, help="the same for the stream, which is slow")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between two versions")
    parser.add_argument("--load", type=int, default=64, help="requests in flight at the engine")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--policy", default="rolling")
    parser.add_argument(
        "--deltas",
        type=split,
        default=["auto"],
        help=f"auto, off, {ANCHORS} (in full, as versions before deltas leave) or several, one after the other",
    )
    parser.add_argument("--changed", type=float, default=1.0, help="share of the weights that each version changes")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--enforce-eager", action="store_true", help="vLLM without CUDA graphs, which starts sooner")
    parser.add_argument("--json", type=Path)
    for hidden in ("--shape", "--transport", "--hub", "--output-dir"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="INFO")
    if args.rank:
        run_rank(args)
    link = link_gbps()
    if link:
        print(f"GPU to GPU: {link:.0f} GB/s\n")
    head = (
        "shape", "transport", "ranks", "GB", "lag s", "pause ms", "take ms", "group ms", "encode ms", "write ms",
        "stage ms", "seal ms", "prepare ms", "activate ms", "GB/s", "of the link", "requests kept",
    )  # fmt: skip
    print(markdown_table([head]), flush=True)
    everything: dict[str, Any] = {"link_gbps": link}
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        for shape in args.shapes:
            folder = made_shape(shape, Path(scratch) / shape) if shape in MADE else SHAPES / shape
            mesh = Mesh(args, folder, Path(scratch) / f"run-{shape}")
            try:
                for epoch, (transport, deltas) in enumerate(product(args.transports, args.deltas), 1):
                    records = mesh.measure(transport, epoch, deltas)
                    if len(args.deltas) > 1:
                        transport = f"{transport}, deltas {deltas}"
                    everything[f"{shape} {transport}"] = records
                    each = max(1, len(args.engine_gpus) // args.engines)
                    ranks = f"{max(1, len(args.trainer_gpus), args.ranks)} to {args.engines} x {each}"
                    if records:
                        print(line_of(shape, transport, ranks, records, link), flush=True)
                    else:
                        print(markdown_row((shape, transport, "failed")), flush=True)
                        print(mesh.last_words(), file=sys.stderr)
                    if args.json:
                        args.json.write_text(json.dumps(everything, indent=1))
            finally:
                mesh.close()


if __name__ == "__main__":
    main()
