"""What applying a delta to an engine's copy of the weights costs on the host, checked to the root, by threads.

    python tests/benchmarks/bench_delta_apply.py --shape qwen3-4b --threads 1 2 4 8 16

A made-up delta of 1.25%, each change by one unit in the last place, onto made-up weights in the shape of a Qwen3. It is
applied and taken back, which is the same work, several times by each number of threads. Beside it the hash of the whole
copy, which is checked meanwhile. Processor seconds (user + system) are a move's on average, by all threads and with the
hash. Needs a version's bytes of memory and a half, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from bench_deltas import SHAPES, Bytes, best_of, manifest_of, plan_of, row, table
from numpy.typing import NDArray

from meshrl.versions.deltas.codec import BLOCK_VALUES, Changes, Packed, Stretch, pack, runs_of, words_of, write_stream
from meshrl.versions.deltas.digests import Edit, lanes_after, lanes_of, with_lanes
from meshrl.versions.deltas.image import WeightImage
from meshrl.versions.deltas.words import from_ordered, ordered
from meshrl.versions.files import HostBytes
from meshrl.wire.types import Manifest

TIMES, DENSITY = 4, 0.0125


def applying(shape: str, thread_counts: Sequence[int]) -> None:
    """A delta onto weights of a shape, by each number of threads."""
    plan = plan_of(shape)
    total = sum(entry.num_bytes for entry in plan)
    random = np.random.default_rng(0)
    block = random.normal(0, 0.02, BLOCK_VALUES).astype(np.float32)
    words = torch.from_numpy(block).bfloat16().view(torch.int16).numpy()
    places = np.flatnonzero(random.random(BLOCK_VALUES) < DENSITY)
    base = manifest_of(0, tuple(replace(entry, digest=bytes(16)) for entry in plan), None)
    held = HostBytes(parts=((0, np.resize(words, total // 2).view(np.uint8)),))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        after, delta = made_up_delta(base, held, places, random, pool)
    print(
        f"{shape}: {total / 2e9:.2f}B weights, {total:,} bytes, {DENSITY:.2%} changed, {len(delta):,} bytes of delta; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, numpy {np.__version__}\n",
        flush=True,
    )
    table("threads", "hash of the image alone s", "apply s (each)", "take back s (each)", "processor s")
    for num_threads in thread_counts:
        image = WeightImage(base, held, num_threads=num_threads)
        image.wait_until_hashed()
        hashed = best_of(1, image.check)[0]
        moves = {"apply": partial(image.apply, after, delta), "take back": image.revert}
        seconds: dict[str, list[str]] = {name: [] for name in moves}
        used = np.zeros(2)
        for name, move in [*moves.items()] * TIMES:
            image.wait_until_hashed()
            before = processor_seconds()
            seconds[name].append(f"{best_of(1, move)[0]:.2f}")
            used += processor_seconds() - before
        user, system = used / (2 * TIMES)
        row(num_threads, hashed, *(", ".join(each) for each in seconds.values()), f"{user:.2f} + {system:.2f}")
        image.wait_until_hashed()
        image.close()


def processor_seconds() -> NDArray[np.float64]:
    """(2,) those of the user and of the system, of this process with all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([used.ru_utime, used.ru_stime])


def made_up_delta(
    base: Manifest,
    held: HostBytes,
    places: NDArray[np.int64],
    random: np.random.Generator,
    threads: ThreadPoolExecutor,
) -> tuple[Manifest, Bytes]:
    """Changes of one unit up or down at `places` of each block, from the weights in `held`."""
    weights = held.parts[0][1]
    steps = random.choice(np.array([1, 2**16 - 1], dtype=np.uint16), len(places))

    def one(run: Stretch) -> tuple[Edit, Packed]:
        here = places[: np.searchsorted(places, run.values)]
        old = words_of(weights, run)[here]
        edit = Edit(run=run, places=here, old=old, new=from_ordered(ordered(old) + steps[: len(here)]))
        return edit, pack(Changes(run=run, places=here, steps=steps[: len(here)]))

    made = list(threads.map(one, runs_of(base.tensors)))
    lanes = lanes_after(base.tensors, lanes_of(base.tensors), weights.take, [edit for edit, _ in made], threads)
    after = manifest_of(base.version + 1, with_lanes(base.tensors, lanes), base)
    return after, write_stream([packed for _, packed in made])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    asked = parser.parse_args()
    applying(asked.shape, asked.threads)


if __name__ == "__main__":
    main()
