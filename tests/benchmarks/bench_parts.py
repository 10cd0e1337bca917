"""A version from trainer ranks to an engine divided over two: broadcast to each rank, against each rank's parts alone.

Senders and receivers are threads of one process over gloo, so the times are those of copies, sums and loopback. A
version's lag is from the first byte until its digests are right on every rank.

    python tests/benchmarks/bench_parts.py --senders 2 --layers 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

import torch

from meshrl.versions.collective.broadcasting import Receiver, ReceiveTimes, Sender
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.plan import PublishPlan, rows_of
from meshrl.versions.placement import PlacementTracer, WeightPlacement, check_parts
from meshrl.versions.snapshot import take_snapshot
from meshrl.wire.manifest import build_manifest, plan_tensors
from meshrl.wire.text_table import markdown_row, markdown_table
from meshrl.wire.types import CollectivePlan, JoinGroup, Manifest, Transport

CPU = torch.device("cpu")
RANKS = 2
DEADLINE_S = 120.0
ROWS, COLUMNS = {"q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "up": (6144, 1024)}, {
    "o": (1024, 2048), "down": (1024, 3072),
}  # fmt: skip
"""Of a layer of Qwen3 0.6B, by how tensor parallelism divides them; `up` with its gate."""


def state_of(layers: int) -> dict[str, torch.Tensor]:
    shapes = {f"{layer}.{name}": shape for layer in range(layers) for name, shape in (ROWS | COLUMNS).items()}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


class Rank:
    """A rank of the engine: its part of every tensor."""

    def __init__(self, rank: int, state: dict[str, torch.Tensor]) -> None:
        def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(RANKS, dim=0 if name.partition(".")[2] in ROWS else 1)[rank]

        self.parameters = {name: torch.empty(part(name, tensor).shape).bfloat16() for name, tensor in state.items()}
        tracer = PlacementTracer(self.parameters)
        with tracer.sources(list(state.items())):
            for name, tensor in state.items():
                self.parameters[name].copy_(part(name, tensor))
        placement = tracer.placement()
        assert placement is not None, tracer.obstacle
        self.placement: WeightPlacement = placement


def carry(
    senders: list[Sender], receivers: list[Receiver], ranks: list[Rank], plan: PublishPlan, manifest: Manifest,
    state: dict[str, torch.Tensor], threads: ThreadPoolExecutor,
) -> tuple[float, list[ReceiveTimes]]:  # fmt: skip
    """Seconds of one version, and what each rank of the engine received."""
    rows = [
        {name: tensor[slice(*rows_of(len(tensor), sender, len(senders)))] for name, tensor in state.items()}
        for sender in range(len(senders))
    ]
    snapshots = [take_snapshot(plan, own, sender, CPU) for sender, own in enumerate(rows)]
    began_s = time.perf_counter()
    sending = [
        threads.submit(each.send, snapshot, stall_s=DEADLINE_S)
        for each, snapshot in zip(senders, snapshots, strict=True)
    ]
    receiving = [
        threads.submit(each.receive_held, manifest, rank.parameters, stall_s=DEADLINE_S)
        for each, rank in zip(receivers, ranks, strict=True)
    ]
    check_parts(manifest, [each.result()[1] for each in receiving])
    times = [each.result()[0] for each in receiving]
    for each in sending:
        each.result()
    return time.perf_counter() - began_s, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    state = state_of(args.layers)
    tensors = plan_tensors((name, "bfloat16", tuple(tensor.shape)) for name, tensor in state.items())
    tensors = tuple(replace(entry, digest=digest_bytes(sum128(state[entry.name]))) for entry in tensors)
    collective = CollectivePlan(num_senders=args.senders, bucket_bytes=args.bucket_mib * 2**20)
    plan = PublishPlan(tensors=tensors, collective=collective)
    manifest = build_manifest(
        run_id="main", epoch=1, version=1, transport=Transport.NCCL, tensors=tensors, chunks=(), collective=collective
    )
    ranks = [Rank(rank, state) for rank in range(RANKS)]
    print(markdown_table([("by", "GB", "GB to a rank", "lag s", "of it bytes s", "digests s")]), flush=True)
    store = open_store("127.0.0.1", deadline_s=DEADLINE_S)
    address = f"127.0.0.1:{store.port}"
    found: dict[str, list[tuple[float, list[ReceiveTimes]]]] = {"broadcast": [], "parts": []}
    with ThreadPoolExecutor(2 * (args.senders + RANKS)) as threads:
        for generation in range(1, 2 * args.versions + 1):  # in turns, each in a group of its own
            name = "parts" if generation % 2 else "broadcast"
            group = JoinGroup(
                generation=generation, store_address=address, backend="gloo", num_senders=args.senders,
                num_receivers=RANKS, first_receiver=0, deadline_s=DEADLINE_S,
            )  # fmt: skip
            meeting = [
                threads.submit(
                    Sender.meet, reach_store(address, deadline_s=DEADLINE_S), generation=generation, backend="gloo",
                    sender=sender, num_receivers=RANKS, device=CPU, deadline_s=DEADLINE_S,
                    plan=plan if name == "parts" else None,
                )
                for sender in range(args.senders)
            ]  # fmt: skip
            joining = [
                threads.submit(Receiver.join, group, index=index, device=CPU, placement=rank.placement)
                for index, rank in enumerate(ranks)
            ]
            senders, receivers = [each.result() for each in meeting], [each.result() for each in joining]
            assert receivers[0].is_scattered is (name == "parts")
            found[name].append(carry(senders, receivers, ranks, plan, manifest, state, threads))
            for each in (*senders, *receivers):
                each.abort()
    for name, versions in found.items():
        times = [each for _, ranks_times in versions for each in ranks_times]
        row = (
            name, f"{plan.num_bytes / 1e9:.3f}", f"{max(each.num_bytes for each in times) / 1e9:.3f}",
            f"{statistics.median(lag_s for lag_s, _ in versions):.2f}",
            f"{statistics.median(each.wire_s for each in times):.2f}",
            f"{statistics.median(each.verify_s for each in times):.2f}",
        )  # fmt: skip
        print(markdown_row(row), flush=True)


if __name__ == "__main__":
    main()
