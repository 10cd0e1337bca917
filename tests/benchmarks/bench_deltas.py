"""Delta versions: their size beside other codes, and what encoding, applying and checking one costs.

    python tests/benchmarks/bench_deltas.py                                       sizes on synthetic changes
    python tests/benchmarks/bench_deltas.py --versions A.safetensors B.safetensors    two versions of a run
    python tests/benchmarks/bench_deltas.py --device cuda --shape qwen3-4b        AdamW steps on a GPU
    python tests/benchmarks/bench_deltas.py --device cuda --shape qwen3-0.6b --steps 60    a policy that learns

With a shape the weights are random, float32 with bfloat16 published; gradients are noise with a small steady part, and
AdamW (0.9, 0.95) has made some steps before the ones that are measured. Versions are made by what a publisher uses
(snapshot: on the training thread; encode: digests and pieces; write: joined, and hashed in chunks; keep), and brought
into an engine's copy of the weights (apply: checked to the root, and what lay at rest; hash: beside staging).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.deltas.codec import Packed, Rows, encode, write_stream
from meshrl.versions.deltas.image import WeightImage
from meshrl.versions.files import HostBytes
from meshrl.versions.snapshot import Captured, take_snapshot, whole_snapshot
from meshrl.versions.transports.base import Prepared, VersionLine
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.versions.transports.stream import StreamShare, StreamTransport
from meshrl.wire.manifest import layout_signature, plan_tensors, result_root
from meshrl.wire.text_table import markdown_row, markdown_table
from meshrl.wire.types import CollectivePlan, Manifest, TensorEntry, Transport, VersionKind

SYNTHETIC_VALUES = 32 * 2**20
DENSITIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.1)
RATES = (1e-6, 3e-6, 1e-5)
WARM_UP, VERSIONS = 8, 3
SAMPLE_BYTES = 2**28  # of a version, for the codes beside ours
BLOCK = 2**23
SHAPES = {  # hidden, intermediate, layers, attention heads, key-value heads
    "tiny": (64, 128, 2, 2, 1),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8),
    "qwen3-4b": (2560, 9728, 36, 32, 8),
}
HEAD, VOCABULARY = 128, 151_936

Bytes = NDArray[np.uint8]
Made = TypeVar("Made")


def plan_of(shape: str) -> tuple[TensorEntry, ...]:
    """The tensors of a model with the shape of a Qwen3 and a tied head."""
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    vocabulary = VOCABULARY if shape != "tiny" else 512
    of_layer = {
        "self_attn.q_proj": (heads * HEAD, hidden), "self_attn.k_proj": (kv_heads * HEAD, hidden),
        "self_attn.v_proj": (kv_heads * HEAD, hidden), "self_attn.o_proj": (hidden, heads * HEAD),
        "self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    specs = [
        ("model.embed_tokens.weight", "bfloat16", (vocabulary, hidden)),
        ("model.norm.weight", "bfloat16", (hidden,)),
    ]
    specs += [
        (f"model.layers.{layer}.{name}.weight", "bfloat16", size)
        for layer in range(layers)
        for name, size in of_layer.items()
    ]
    return plan_tensors(specs)


def other_codes(old: Bytes, new: Bytes, width: int, threads: ThreadPoolExecutor) -> tuple[int, int]:
    """Bytes of XOR + zstd, and of 32-bit indices + values without compression."""
    spans = [(at, min(at + BLOCK, len(old))) for at in range(0, len(old), BLOCK)]

    def xor(span: tuple[int, int]) -> int:
        return len(zstandard.ZstdCompressor(level=1).compress((old[slice(*span)] ^ new[slice(*span)]).data))

    dtype = f"<u{width}"
    changed = sum(int(np.count_nonzero(old[a:b].view(dtype) != new[a:b].view(dtype))) for a, b in spans)
    return sum(threads.map(xor, spans)), changed * (4 + width)


def row(*cells: object) -> None:
    print(markdown_row(f"{cell:,.4g}" if isinstance(cell, float) else cell for cell in cells), flush=True)


def table(*names: str) -> None:
    print(markdown_table([names]), flush=True)


def best_of(times: int, work: Callable[[], Made]) -> tuple[float, Made]:
    """The shortest time of `times`, and what `work` returned."""
    shortest = float("inf")
    for _ in range(times):
        began_s = time.perf_counter()
        made = work()
        shortest = min(shortest, time.perf_counter() - began_s)
    return shortest, made


def synthetic(threads: ThreadPoolExecutor) -> None:
    """Random weights; places of changes uniform, 94% of them by one unit in the last place, 6% by two."""
    random = np.random.default_rng(0)
    old = (
        torch.from_numpy(random.normal(0, 0.02, SYNTHETIC_VALUES).astype(np.float32))
        .bfloat16()
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
    )
    plan = plan_tensors([("weights", "bfloat16", (SYNTHETIC_VALUES,))])
    table("changed", "XOR + zstd", "index + value", "gaps + steps", "entropy bound", "encode s")
    for density in DENSITIES:
        new = old.copy()
        places = np.flatnonzero(random.random(SYNTHETIC_VALUES) < density)
        new[places] += (
            random.choice([1, 1 - 2], len(places)) * random.choice([1, 2], len(places), p=[0.94, 0.06])
        ).astype(np.uint16)
        old_bytes, new_bytes = old.view(np.uint8), new.view(np.uint8)
        seconds, made = best_of(2, partial(encode, Rows(plan), old_bytes, new_bytes, threads))
        size = len(write_stream([packed for _, packed in made]))
        xor, plain = other_codes(old_bytes, new_bytes, 2, threads)
        full = len(old_bytes)
        bits = (
            -density * np.log2(density)
            - (1 - density) * np.log2(1 - density)
            + density * (1 + -0.94 * np.log2(0.94) - 0.06 * np.log2(0.06))
        )
        row(
            f"{density:.2%}",
            *(f"1/{full / part:.0f}" for part in (xor, plain, size, SYNTHETIC_VALUES * bits / 8)),
            seconds,
        )


def of_versions(first: Path, second: Path, threads: ThreadPoolExecutor) -> None:
    """Two versions or checkpoints of a run, as they are published."""
    states = [
        whole_snapshot({name: tensor.bfloat16() for name, tensor in load_file(path).items()})
        for path in (first, second)
    ]
    plan = states[0].tensors
    old, new = (state.flat.numpy() for state in states)
    report(plan, old, new, threads, str(second))


def report(plan: Sequence[TensorEntry], old: Bytes, new: Bytes, threads: ThreadPoolExecutor, name: str) -> None:
    seconds, made = best_of(3, lambda: encode(Rows(plan), old, new, threads))
    pieces: list[Packed] = [packed for _, packed in made]
    delta = write_stream(pieces)
    xor, plain = other_codes(old, new, 2, threads)
    apply_s = applied(plan, old, [(new, delta)], 2)[0]
    table(
        "versions", "bytes", "changed", "XOR + zstd", "index + value", "gaps + steps", "encode s", "apply and check s"
    )
    changed = sum(piece.changed for piece in pieces) * 2 / len(old)
    row(
        name,
        f"{len(old):,}",
        f"{changed:.2%}",
        *(f"1/{len(old) / part:.1f}" for part in (xor, plain, len(delta))),
        seconds,
        apply_s,
    )


def digested(plan: Sequence[TensorEntry], stream: torch.Tensor) -> tuple[TensorEntry, ...]:
    """The tensors with their digests, made where the byte stream lies."""
    spans = ((entry, stream[entry.offset : entry.offset + entry.num_bytes]) for entry in plan)
    return tuple(replace(entry, digest=digest_bytes(sum128(data))) for entry, data in spans)


def manifest_of(version: int, tensors: tuple[TensorEntry, ...], base: Manifest | None) -> Manifest:
    layout = layout_signature((entry.name, entry.dtype, entry.shape) for entry in tensors)
    return Manifest(
        run_id="bench", epoch=1, version=version, transport=Transport.STREAM, tensors=tensors, chunks=(),
        kind=VersionKind.FULL if base is None else VersionKind.DELTA,
        base_version=None if base is None else base.version, base_root=b"" if base is None else base.result_root,
        result_root=result_root(tensors), layout_signature=layout,
        digest_algorithm="sum128",
    )  # fmt: skip


def applied(
    plan: Sequence[TensorEntry], old: Bytes, steps: Iterable[tuple[Bytes, Bytes]], num_threads: int
) -> list[float]:
    """Seconds of each delta onto an image of `old`, checked to the root of (new, delta).

    What lies at rest is checked within; it is hashed anew afterwards, beside staging.
    """
    base = manifest_of(0, digested(plan, torch.from_numpy(old)), None)
    image = WeightImage(base, HostBytes(parts=((0, old.copy()),)), num_threads=num_threads)
    seconds = []
    try:
        for number, (new, delta) in enumerate(steps, 1):
            after = manifest_of(number, digested(plan, torch.from_numpy(new)), image.manifest)
            image.wait_until_hashed()
            began_s = time.perf_counter()
            image.apply(after, delta)
            seconds.append(time.perf_counter() - began_s)
            assert image.held.parts[0][1].tobytes() == new.tobytes(), "the image is not the version"
    finally:
        image.close()
    return seconds


class Weights:
    """Float32 weights with AdamW's state, a flat buffer each, on a device."""

    def __init__(self, plan: tuple[TensorEntry, ...], device: torch.device) -> None:
        self.plan, self.device = plan, device
        num_values = sum(entry.num_bytes for entry in plan) // 2
        self.master = torch.empty(num_values, device=device).normal_(0, 0.02)
        self.mean, self.square = (torch.zeros_like(self.master) for _ in range(2))
        self.steps = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            entry.name: self.master[entry.offset // 2 : (entry.offset + entry.num_bytes) // 2].view(entry.shape)
            for entry in self.plan
        }

    def published(self) -> torch.Tensor:
        """(bytes,) the weights in bfloat16."""
        return self.master.bfloat16().view(torch.uint8)

    def step(self, rate: float) -> None:
        """One step of AdamW on gradients of noise and a small steady part, in parts of the buffer."""
        self.steps += 1
        for at in range(0, len(self.master), 2**26):
            part = slice(at, at + 2**26)
            gradient = torch.randn_like(self.master[part]).add_(self.master[part], alpha=5.0)
            mean, square = self.mean[part], self.square[part]
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient.square_(), 0.05)
            scale = rate / (1 - 0.9**self.steps)
            spread = (square / (1 - 0.95**self.steps)).sqrt_().add_(1e-8)
            self.master[part].addcdiv_(mean, spread, value=-scale)


class Policy:
    """A model of a shape in float32 with AdamW, on random texts that it first learns to read backwards."""

    LENGTH, ROWS, SYMBOLS = 48, 32, 512

    def __init__(self, shape: str, device: torch.device) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(Path(__file__).parent / "shapes" / shape)
        with device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.device, self.optimizer = (
            device,
            torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0),
        )
        self.right = 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def published(self) -> torch.Tensor:
        """(bytes,) the weights in bfloat16, in the order of the byte stream."""
        own = self.tensors()
        plan = plan_tensors((name, "bfloat16", tuple(tensor.shape)) for name, tensor in own.items())
        return torch.cat([own[entry.name].detach().bfloat16().reshape(-1).view(torch.uint8) for entry in plan])

    def step(self, rate: float, *, by_reward: bool) -> None:
        """By the texts themselves, or by a reward of 1 for each right token of a policy gradient's own choice."""
        text = torch.randint(1, self.SYMBOLS, (self.ROWS, self.LENGTH), device=self.device)
        ids = torch.cat([text, text.new_zeros(self.ROWS, 1), text.flip(1)], dim=1)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(ids[:, :-1], use_cache=False).logits[:, self.LENGTH :].float()
        logprobs, targets = torch.log_softmax(logits, dim=-1), ids[:, self.LENGTH + 1 :]
        chosen = targets
        if by_reward:
            chosen = torch.distributions.Categorical(logits=logits.detach()).sample()
        reward = (chosen == targets).float()
        weight = (reward - reward.mean()) / (reward.std() + 1e-6) if by_reward else torch.ones_like(reward)
        self.right = float((logits.argmax(-1) == targets).float().mean())
        loss = -(weight * logprobs.gather(-1, chosen[..., None]).squeeze(-1)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


async def trained(shape: str, device: torch.device, num_threads: int, steps: int, warm_up: int) -> None:
    """Versions of a policy that learns from rewards at a rate of 1e-6, after a warm-up from random weights."""
    policy = Policy(shape, device)
    for _ in range(warm_up):
        policy.step(1e-4, by_reward=False)
    policy.optimizer.state.clear()
    plan = plan_tensors((name, "bfloat16", tuple(tensor.shape)) for name, tensor in policy.tensors().items())
    total = sum(entry.num_bytes for entry in plan)
    print(f"{shape}: {total:,} bytes in full, {warm_up} steps of warm-up: {policy.right:.1%} right\n", flush=True)
    table(
        "version", "kind", "changed", "tensors that change", "bytes", "of full", "right", *(f"{p} s" for p in SECONDS)
    )
    trainer, old = Trainer(plan, policy, num_threads), None
    shares = []
    for version in range(steps + 1):
        if version:
            policy.step(1e-6, by_reward=True)
        made, _, seconds = await trainer.publish(slice(0, 0))
        new = policy.published()
        if old is not None:
            differs = old.view(torch.int16) != new.view(torch.int16)
            touched = sum(bool(differs[e.offset // 2 : (e.offset + e.num_bytes) // 2].any()) for e in plan)
            shares.append((float(differs.float().mean()), made.manifest.payload_bytes / total))
            row(
                version, made.manifest.kind.value, f"{shares[-1][0]:.3%}", f"{touched} of {len(plan)}",
                f"{made.manifest.payload_bytes:,}", f"1/{1 / shares[-1][1]:.1f}", f"{policy.right:.1%}",
                *(seconds[part] for part in SECONDS),
            )  # fmt: skip
        old = new
    changed, sizes = (sorted(column) for column in zip(*shares, strict=True))
    print(f"\nmedian: {changed[len(changed) // 2]:.3%} changed, 1/{1 / sizes[len(sizes) // 2]:.1f} of the full bytes")
    await trainer.close()


class Trainer:
    """Rank 0 of a trainer of one process: its share and its transport, and an engine's copy of the weights."""

    def __init__(self, plan: tuple[TensorEntry, ...], weights: Weights | Policy, num_threads: int) -> None:
        self.plan, self.weights, self.num_threads = plan, weights, num_threads
        self.share = StreamShare(Path(), epoch=1, num_threads=num_threads)
        self.transport = StreamTransport(
            VersionLine(run_id="bench", epoch=1),
            RankCalls(self.share, None, num_ranks=1),
            self.share,
            num_threads=num_threads,
            anchor_every=1000,
        )
        self.image: WeightImage | None = None
        self.version = 0

    async def publish(self, sample: slice) -> tuple[Prepared, Bytes, dict[str, float]]:
        """A version of the weights as they are, brought into the engine's copy; its sample and the seconds."""
        own, device = self.weights.tensors(), self.weights.device
        wait(device)
        began_s = time.perf_counter()
        whole = PublishPlan(tensors=tuple(self.plan), collective=CollectivePlan(num_senders=1, bucket_bytes=2**28))
        reuse = self.share.release_snapshot()
        snapshot = take_snapshot(whole, own, 0, device, reuse=reuse)
        wait(device)
        seconds = {"snapshot": time.perf_counter() - began_s}
        self.share.held.put(self.version, snapshot)
        made = await self.transport.prepare(self.version, Captured())
        seconds |= made.parts_s
        seconds |= await self.transport.deliver(self.version)
        self.version += 1
        assert made.buffer is not None
        began_s = time.perf_counter()
        if made.manifest.kind is VersionKind.FULL:
            if self.image is not None:
                self.image.close()
            held = HostBytes(parts=((0, made.buffer.copy()),))
            self.image = WeightImage(made.manifest, held, num_threads=self.num_threads)
        else:
            assert self.image is not None
            self.image.apply(made.manifest, made.buffer)
        seconds["apply"] = time.perf_counter() - began_s
        self.image.wait_until_hashed()
        seconds["hash"] = time.perf_counter() - began_s - seconds["apply"]
        return made, snapshot.flat[sample].cpu().numpy(), seconds

    async def close(self) -> None:
        assert self.image is not None
        served = torch.from_numpy(self.image.held.parts[0][1])
        same = torch.equal(served.to(self.weights.device), self.weights.published())
        self.image.close()
        await self.transport.close()
        assert same, "the image is not the version"


SECONDS = ("snapshot", "encode", "write", "keep", "apply", "hash")


async def published(shape: str, device: torch.device, num_threads: int) -> None:
    """Versions of a trainer on a GPU, through what its publisher uses, into an engine's copy on the host."""
    plan = plan_of(shape)
    total = sum(entry.num_bytes for entry in plan)
    print(
        f"{shape}: {total / 2e9:.2f}B weights, {total:,} bytes, {num_threads} threads; torch {torch.__version__}\n",
        flush=True,
    )
    table("lr", "kind", "changed", "XOR + zstd", "index + value", "this", "bytes", *(f"{part} s" for part in SECONDS))
    weights = Weights(plan, device)
    trainer = Trainer(plan, weights, num_threads)
    sample = slice(total // 4 // 4 * 4, total // 4 // 4 * 4 + min(SAMPLE_BYTES, total // 2) // 4 * 4)
    with ThreadPoolExecutor(num_threads) as threads:
        _, old, _ = await trainer.publish(sample)
        for rate in RATES:
            for number in range(VERSIONS + 1):
                for _ in range(1 if number else WARM_UP):  # the first version is of several steps
                    weights.step(rate)
                made, new, seconds = await trainer.publish(sample)
                parts = other_codes(old, new, 2, threads)
                payload = made.manifest.payload_bytes
                row(
                    rate,
                    f"{made.manifest.kind.value}, {1 if number else WARM_UP} step(s)",
                    f"{np.count_nonzero(old.view('<u2') != new.view('<u2')) * 2 / len(old):.2%}",
                    *(f"1/{len(old) / part:.1f}" for part in parts),
                    f"1/{total / payload:.1f}",
                    f"{payload:,}",
                    *(seconds[part] for part in SECONDS),
                )
                old = new
    await trainer.close()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape")
    parser.add_argument("--versions", nargs=2, type=Path)
    parser.add_argument("--steps", type=int, help="train a shape for so many steps at 1e-6, and publish each")
    parser.add_argument("--warm-up", type=int, default=80, help="steps before those, at 1e-4")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    with ThreadPoolExecutor(asked.threads) as threads:
        if asked.versions:
            of_versions(asked.versions[0], asked.versions[1], threads)
        elif asked.shape and asked.steps:
            asyncio.run(trained(asked.shape, torch.device(asked.device), asked.threads, asked.steps, asked.warm_up))
        elif asked.shape:
            asyncio.run(published(asked.shape, torch.device(asked.device), asked.threads))
        else:
            synthetic(threads)


if __name__ == "__main__":
    main()
