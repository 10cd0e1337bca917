"""Lag of a version over a bad internet, from a trainer's rank to an engine that serves it, in full and as a delta.

    python tests/benchmarks/bench_wan_sync.py --shapes 30m qwen3-0.6b --changed 0.02 --versions 4
    python tests/benchmarks/bench_wan_sync.py --shapes small --transport nccl --changed 0.01

The hub and the rank of `bench_weight_sync`, which makes random changes, are at one place; an embedded engine is at
another, behind a NAT: 100 ms there and back, 1% of packets lost, 100 Mb/s, cubic. The first version goes in full, the
others as deltas. A version's lag is from the moment at which the weights have changed until the hub has heard that the
engine serves it; `commit` is the part of it after the version is sealed. With transport nccl, which is gloo here, the
line has 100 Mb/s, 10 ms there and back and no loss. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("support", "wan")]
import torch

from bench_weight_sync import MADE, SHAPES, build, made_shape
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.wire.text_table import markdown_row, markdown_table
from meshrl_examples.model import create_model
from wan_rig import BAD, PERFECT, Line, Wan, open_wan, why_not

START_S, RUN_S = 600.0, 1500.0


def model_of(shape: str, folder: Path) -> Path:
    """A folder with the config, and weights for the engine, of a shape."""
    if shape == "30m":  # 31.6M parameters
        create_model(folder, seed=0, hidden_size=512, head_dim=128, num_layers=10)
        return folder
    if shape in MADE:
        made_shape(shape, folder)
    else:
        folder.mkdir()
        (folder / "config.json").write_text((SHAPES / shape / "config.json").read_text())
    build(folder, torch.device("cpu"), RankGroup(device=torch.device("cpu"))).bfloat16().save_pretrained(folder)
    return folder


class Programs:
    """Programs at the sites, with their consoles in a folder."""

    def __init__(self, wan: Wan, folder: Path) -> None:
        self._wan, self._folder = wan, folder

    def start(self, site: str, name: str, *command: str) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.txt").open("w") as console:
            return self._wan.start(
                site, [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "GLOO_SOCKET_IFNAME": "wan"},
            )  # fmt: skip

    def console(self, name: str) -> str:
        return (self._folder / f"{name}.txt").read_text(errors="replace")

    def wait_for(self, name: str, text: str, program: subprocess.Popen[str]) -> None:
        end_s = time.monotonic() + START_S
        while not re.search(text, self.console(name)):
            if program.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{name} did not say {text!r}:\n{self.console(name)[-3000:]}")
            time.sleep(0.2)


def line_of(asked: argparse.Namespace) -> Line:
    """The site's line. Behind a NAT no engine can be in a group."""
    if asked.transport == "nccl":
        return Line(down_mbps=100.0, up_mbps=100.0, delay_s=0.005)
    return Line(**{**vars(BAD), "nat": True})


def measure(shape: str, asked: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        open_wan({"origin": PERFECT, "site": line_of(asked)}) as wan,
    ):
        folder = Path(name)
        model, programs = model_of(shape, folder / "model"), Programs(wan, folder)
        hub, at = f"{wan.addresses['origin']}:5000", ["--output-dir", str(folder)]
        server = ["--server.host", "0.0.0.0", "--server.port", "5000", "--server.insecure", "true"]
        serving = programs.start("origin", "weights", "-m", "meshrl.weights.main", *server, *at)
        engine = programs.start(
            "site", "engine", "-m", "meshrl.inference.main", "--engine", "embedded", "--model.name", str(model),
            "--model.dtype", "bfloat16", "--max-model-len", "128", "--torch-threads", "1", "--server.port", "8000",
            "--weight-broadcast.type", "stream", "--weight-broadcast.address", hub, "--output-dir", str(folder / "far"),
        )  # fmt: skip
        programs.wait_for("engine", "registered at the weight hub", engine)
        broadcast = ["--host", wan.addresses["origin"], "--bucket-mib", "4"] if asked.transport == "nccl" else []
        before = wan.change()["site"]["down"]
        rank = programs.start(
            "origin", "rank", str(Path(__file__).with_name("bench_weight_sync.py")), "--rank", "--shape", str(model),
            "--transport", asked.transport, "--hub", hub, "--epoch", "1", "--steps", str(asked.versions), "--policy",
            "rolling", "--deltas", "auto", "--changed", str(asked.changed), *broadcast, *at,
        )  # fmt: skip
        if rank.wait(RUN_S) != 0:
            raise SystemExit(programs.console("rank")[-3000:])
        records = json.loads(programs.console("rank").strip().splitlines()[-1])
        sent = wan.change()["site"]["down"] - before
        parts = dict(re.findall(r"version (\d+) is prepared in \S+ s: (.+)", programs.console("engine")))
        for program in (engine, serving):
            program.terminate()
    for version, record in enumerate(records):
        made_s, commit_s = record["take_s"] + record["publish_s"], record["activate_s"]
        kind = "delta" if record["bytes"] < records[0]["bytes"] else "full"
        row = (
            shape, version, kind, f"{record['bytes'] / 1e6:.2f}", f"{record['lag_s']:.2f}",
            f"{made_s:.2f}", f"{commit_s:.2f}", f"{record['prepare_s']:.2f}", f"{record['pause_s'] * 1e3:.0f}",
            f"{record['bytes'] * 8e-6 / record['prepare_s']:.1f}", parts.get(str(version), ""),
        )  # fmt: skip
        print(markdown_row(row), flush=True)
    total = sum(record["bytes"] for record in records)
    print(f"\n{shape}: {sent / total:.3f} bytes on the line for each byte of the versions\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", default=["30m"], help="30m, small, or folders of tests/benchmarks/shapes"
    )
    parser.add_argument("--transport", choices=["stream", "nccl"], default="stream", help="nccl: gloo, over 100 Mb/s")
    parser.add_argument("--versions", type=int, default=4, help="deltas, after the full version")
    parser.add_argument("--changed", type=float, default=0.02, help="share of the weights that a delta changes")
    asked = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 2
    head = ("shape", "version", "sent", "MB", "lag s", "taken and made s", "commit s", "prepared s", "pause ms", "Mb/s")
    print(markdown_table([(*head, "of the preparing, s")]), flush=True)
    for shape in asked.shapes:
        measure(shape, asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
