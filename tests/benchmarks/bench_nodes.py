"""Two trainer nodes and two engine nodes without a scheduler, each in a network namespace with an address of its own.

Every node has an output folder of its own; the model is the only folder that they share. The commands are those of
docs/deployment.md. Prints who was where, and what the run came to. Needs root and `ip`:

    python tests/benchmarks/bench_nodes.py [--steps 5]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshrl.environments.reverse_text.model import create_model
from meshrl.orchestrator.ledger.audit import audit

NET = "10.77.31"
NODES = ("trainer0", "trainer1", "engine0", "engine1")
DEADLINE_S = 900.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60)


@contextmanager
def network(prefix: str) -> Iterator[dict[str, str]]:
    """A bridge and a namespace for each node; yields their addresses."""
    bridge = f"{prefix}br"
    with ExitStack() as undo:
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        addresses = {}
        for number, node in enumerate(NODES):
            space, inside, outside = f"{prefix}{node}", f"{prefix}i{number}", f"{prefix}o{number}"
            ip("netns", "add", space)
            undo.callback(ip, "netns", "del", space)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
            ip("link", "set", outside, "master", bridge, "up")
            addresses[node] = f"{NET}.{number + 1}"
            ip("-n", space, "addr", "add", f"{addresses[node]}/24", "dev", inside)
            ip("-n", space, "link", "set", inside, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield addresses


def commands(addresses: dict[str, str], model: Path, folder: Path, steps: int) -> list[tuple[str, str, list[str]]]:
    """Node, name and command of every program."""
    head, rl = addresses["trainer0"], [sys.executable, "-m"]
    hub = f"{head}:50053"
    stream = ["--weight-broadcast.type", "stream", "--weight-broadcast.address", hub]

    def open_at(node: str) -> list[str]:
        return ["--server.host", addresses[node], "--server.insecure", "--output-dir", str(folder / node)]

    trainer = [
        "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", head, "--master-port",
        "29500", "-m", "meshrl.trainer.main", "--model.name", str(model), "--max-steps", str(steps), "--seq-len",
        "1024", "--torch-threads", "1", *stream,
    ]  # fmt: skip
    ranks = [[*trainer[:3], "--node-rank", str(rank), *trainer[3:]] for rank in range(2)]
    engine = [
        "meshrl.inference.main",
        "--model.name",
        str(model),
        "--max-model-len",
        "128",
        "--torch-threads",
        "1",
        *stream,
    ]
    return [
        ("trainer0", "weights", [*rl, "meshrl.weights.main", *open_at("trainer0"), "--min-engines", "2"]),
        ("engine0", "inference", [*rl, *engine, *open_at("engine0")]),
        ("engine1", "inference", [*rl, *engine, *open_at("engine1")]),
        ("trainer0", "trainer", [*rl, *ranks[0], *open_at("trainer0")]),
        ("trainer1", "trainer", [*rl, *ranks[1], "--output-dir", str(folder / "trainer1")]),
        ("trainer0", "rollout", [*rl, "meshrl.rollout.main", "--model.name", str(model), "--env.0.id", "reverse_text",
                                 "--weights", hub, "--seq-len", "128", *open_at("trainer0")]),
        ("trainer0", "orchestrator", [
            *rl, "meshrl.orchestrator.main", "--train.env.0.id", "reverse_text", "--max-steps", str(steps),
            "--batch-size", "16", "--group-size", "4", "--seq-len", "1024", "--sampling.max-tokens", "16",
            "--no-filters.zero-signal", "--services.weights", hub, "--services.trainer", f"{head}:50052",
            "--services.rollout", f"{head}:50051", "--output-dir", str(folder / "trainer0"),
        ]),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("needs root and ip (iproute2): network namespaces are made")
        return 2
    prefix = f"m{os.getpid() % 10000}"
    with tempfile.TemporaryDirectory(prefix="meshrl-nodes-") as name, network(prefix) as addresses, ExitStack() as undo:
        folder = Path(name)
        create_model(folder / "model", seed=0)
        started: dict[str, subprocess.Popen[bytes]] = {}
        for node, program, command in commands(addresses, folder / "model", folder, steps):
            log = undo.enter_context((folder / f"{node}.{program}.out").open("wb"))
            process = subprocess.Popen(
                ["ip", "netns", "exec", f"{prefix}{node}", *command],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": f"{prefix}i{NODES.index(node)}", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            started[f"{node}.{program}"] = process
            undo.callback(end, process)
        leader, began = started["trainer0.orchestrator"], time.monotonic()
        while leader.poll() is None and time.monotonic() - began < DEADLINE_S:
            gone = [name for name, each in started.items() if each.poll() not in (None, 0)]
            if gone:
                print(f"{gone[0]} died:\n{(folder / f'{gone[0]}.out').read_text()[-3000:]}")
                return 1
            time.sleep(0.5)
        if leader.poll() != 0:
            print((folder / "trainer0.orchestrator.out").read_text()[-3000:])
            return 1
        report(folder, addresses)
    return 0


def end(process: subprocess.Popen[bytes]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(timeout=30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def report(folder: Path, addresses: dict[str, str]) -> None:
    records = [json.loads(line) for line in (folder / "trainer0" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward/all/mean" in record]
    log = (folder / "trainer0.weights.out").read_text() + (folder / "trainer0.trainer.out").read_text()
    rows = [
        ("nodes", ", ".join(f"{node} {address}" for node, address in addresses.items())),
        ("steps trained", str([record["step"] for record in steps])),
        ("training ranks", "2" if "on 2 rank(s)" in log else "not 2"),
        ("mismatch_kl of the last step", f"{steps[-1]['mismatch_kl/all/mean']:.1e}"),
        ("versions at engines", ", ".join(served(folder, node) for node in ("engine0", "engine1"))),
        ("ledger", "whole" if not audit(folder / "trainer0").violations else "NOT whole"),
    ]
    print("| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows))


def served(folder: Path, node: str) -> str:
    lines = [line for line in (folder / f"{node}.inference.out").read_text().splitlines() if "is served" in line]
    return f"{node}: {len(lines)} served"


if __name__ == "__main__":
    sys.exit(main())
