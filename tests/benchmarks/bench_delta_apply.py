"""What applying a delta to an engine's copy of the weights costs on the host, checked to the root, by threads.

    python tests/benchmarks/bench_delta_apply.py --shape qwen3-4b --threads 16

A made-up delta of 1.25%, each change by one unit in the last place, onto made-up weights in the shape of a Qwen3, by 1,
2, 4 and so on threads; beside it the hash of the whole copy, which is checked meanwhile. Needs a version's bytes of
memory and a half, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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

DELTAS, DENSITY = 4, 0.0125


def applying(shape: str, most_threads: int) -> None:
    """Deltas onto weights of a shape, by more and more threads."""
    plan = plan_of(shape)
    total = sum(entry.num_bytes for entry in plan)
    random = np.random.default_rng(0)
    block = random.normal(0, 0.02, BLOCK_VALUES).astype(np.float32)
    words = torch.from_numpy(block).bfloat16().view(torch.int16).numpy()
    places = np.flatnonzero(random.random(BLOCK_VALUES) < DENSITY)
    base = manifest_of(0, tuple(replace(entry, digest=bytes(16)) for entry in plan), None)
    print(f"{shape}: {total / 2e9:.2f}B weights, {total:,} bytes; {os.cpu_count()} cores\n", flush=True)
    table("threads", "changed", "bytes", "hash of the image alone s", "apply s (each)")
    threads = 1
    while threads <= most_threads:
        weights = np.resize(words, total // 2).view(np.uint8)
        image = WeightImage(base, HostBytes(parts=((0, weights),)), num_threads=threads)
        del weights
        seconds, size, hashed = [], 0, 0.0
        with ThreadPoolExecutor(most_threads) as pool:
            for _ in range(DELTAS):
                after, delta = made_up_delta(image, places, random, pool)
                image.wait_until_hashed()
                hashed = best_of(1, image.check)[0]
                began_s = time.perf_counter()
                image.apply(after, delta)
                seconds.append(time.perf_counter() - began_s)
                image.confirm()
                size = len(delta)
        image.close()
        del image
        row(threads, f"{DENSITY:.2%}", f"{size:,}", hashed, ", ".join(f"{each:.2f}" for each in seconds))
        threads *= 2


def made_up_delta(
    image: WeightImage, places: NDArray[np.int64], random: np.random.Generator, threads: ThreadPoolExecutor
) -> tuple[Manifest, Bytes]:
    """Changes of one unit up or down at `places` of each block, from what is in the image."""
    held, before = image.held.parts[0][1], image.manifest
    steps = random.choice(np.array([1, 2**16 - 1], dtype=np.uint16), len(places))

    def one(run: Stretch) -> tuple[Edit, Packed]:
        here = places[: np.searchsorted(places, run.values)]
        old = words_of(held, run)[here]
        edit = Edit(run=run, places=here, old=old, new=from_ordered(ordered(old) + steps[: len(here)]))
        return edit, pack(Changes(run=run, places=here, steps=steps[: len(here)]))

    made = list(threads.map(one, runs_of(before.tensors)))
    lanes = lanes_after(before.tensors, lanes_of(before.tensors), held.take, [edit for edit, _ in made], threads)
    after = manifest_of(before.version + 1, with_lanes(before.tensors, lanes), before)
    return after, write_stream([packed for _, packed in made])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, default=16, help="the most")
    asked = parser.parse_args()
    applying(asked.shape, asked.threads)


if __name__ == "__main__":
    main()
