"""A running `inference` program with a hub beside it, and a plain model to compare with: the engine contract's kit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshrl.client import WeightSyncClient
from meshrl.environments.reverse_text.model import create_model
from meshrl.wire import manifest as manifests
from meshrl.wire.types import Activation, AdapterConfig, Chunk, FileEntry, Transport

ROOT = Path(__file__).resolve().parents[2]
READY_S = 240.0
MAX_LEN = 256


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """One engine under the contract: how to start it, and how far its numbers may be from a plain float32 forward."""

    name: str
    python: Path
    flags: tuple[str, ...]
    dtype: torch.dtype
    mean_gap: float
    largest_gap: float
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        return None if self.python.exists() else f"{self.python} is missing; `make vllm` makes it"


EMBEDDED = EngineKind(
    name="embedded",
    python=Path(sys.executable),
    flags=("--model.dtype", "float32"),
    dtype=torch.float32,
    mean_gap=1e-5,
    largest_gap=2e-4,
)
VLLM = EngineKind(
    name="vllm",
    python=Path(os.environ.get("MESHRL_VLLM_PYTHON", ROOT / ".tools/vllm/bin/python")),
    flags=("--model.dtype", "bfloat16", "--enforce-eager"),
    dtype=torch.bfloat16,
    mean_gap=0.03,
    largest_gap=0.3,
    environ={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
)


def make_models(folder: Path) -> dict[str, Path]:
    """Two checkpoints of one tiny shape, far apart, in weights that bfloat16 holds exactly; with a tokenizer."""
    found = {}
    for seed, name in enumerate("ab"):
        found[name] = folder / name
        create_model(found[name], seed=seed, hidden_size=128, num_layers=2, head_dim=32)
        model = AutoModelForCausalLM.from_pretrained(found[name], dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0)
                parameter.copy_(parameter.bfloat16())
        model.save_pretrained(found[name])
    return found


class PlainModel:
    """The reference: transformers' forward pass in float32, token by token where it must."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        """(T, V) logits that each token of the completion was sampled from."""
        ids = torch.tensor([[*prompt, *completion]])
        logits: torch.Tensor = self.model(ids).logits[0]
        return logits[len(prompt) - 1 : -1]

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int], **cuts: Any) -> torch.Tensor:
        """(T,) logprobs of the processed distribution; see `processed`."""
        rows_TV = processed(self.logits(prompt, completion), **cuts)
        return rows_TV.gather(1, torch.tensor(completion)[:, None])[:, 0]

    def greedy_gaps(self, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        """(T,) how much likelier the likeliest token is than the one taken; 0 for a greedy completion."""
        rows_TV = torch.log_softmax(self.logits(prompt, completion), -1)
        return rows_TV.max(-1).values - rows_TV.gather(1, torch.tensor(completion)[:, None])[:, 0]


def processed(
    logits_TV: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """(T, V) log-probabilities after temperature, min_p, top_k and top_p, normalised again; a cut token has -inf."""
    rows_TV = torch.log_softmax(logits_TV / temperature, -1)
    if min_p:
        rows_TV = rows_TV.masked_fill(
            rows_TV < rows_TV.max(-1, keepdim=True).values + torch.tensor(min_p).log(), -torch.inf
        )
    if top_k:
        least = rows_TV.topk(top_k).values[:, -1:]
        rows_TV = rows_TV.masked_fill(rows_TV < least, -torch.inf)
    if top_p < 1.0:
        ordered, index = torch.log_softmax(rows_TV, -1).sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        keep = torch.zeros_like(rows_TV, dtype=torch.bool).scatter(1, index, before < top_p)
        rows_TV = rows_TV.masked_fill(~keep, -torch.inf)
    return torch.log_softmax(rows_TV, -1)


class RunningEngine:
    """The programs `weights` and `inference`, and versions published to them. Use as a context manager."""

    def __init__(self, kind: EngineKind, folder: Path, models: Mapping[str, Path], *flags: str) -> None:
        self.kind, self.models = kind, models
        self._folder = folder
        folder.mkdir(parents=True)
        hub_port, port = _free_port(), _free_port()
        self.hub = f"127.0.0.1:{hub_port}"
        self.url = f"http://127.0.0.1:{port}"
        self.version = -1
        self.serving = ""
        self._weights = self._start("weights", Path(sys.executable), "--server.port", str(hub_port))
        self.program = self._start(
            "inference", kind.python, "--engine", kind.name, "--model.name", str(models["a"]), *kind.flags,
            "--server.port", str(port), "--max-model-len", str(MAX_LEN), "--max-num-seqs", "16",
            "--weight-broadcast.address", self.hub, "--engine-id", "engine", *flags,
        )  # fmt: skip

    def _start(self, program: str, python: Path, *flags: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(self.kind.environ if program == "inference" else {})}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "services"), str(ROOT / "clients/python")])
        command = [str(python), "-m", f"meshrl.{program}.main", "--output-dir", str(self._folder), *flags]
        with (self._folder / f"{program}.out").open("wb") as out:
            return subprocess.Popen(
                command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=self._folder
            )

    def __enter__(self) -> RunningEngine:
        end_s = time.monotonic() + READY_S
        while not self._healthy():
            if self.program.poll() is not None or time.monotonic() > end_s:
                self.close()
                raise AssertionError(f"{self.kind.name} did not come up:\n{self.output()[-4000:]}")
            time.sleep(0.25)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def output(self) -> str:
        return (self._folder / "inference.out").read_text(errors="replace")

    def close(self) -> None:
        for process in (self.program, self._weights):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)

    # --- versions -------------------------------------------------------------------------------

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """A checkpoint's tensors in the engine's dtype; a tied duplicate is not stored."""
        stored = load_file(self.models[name] / "model.safetensors")
        return {key: tensor.to(self.kind.dtype) for key, tensor in stored.items()}

    async def serve(self, name: str) -> int:
        """Has the engine serve checkpoint `name`; publishes it as the next version unless it is served."""
        if self.serving != name:
            await self.publish(self.state(name))
            self.serving = name
        return self.version

    async def publish(
        self, state: Mapping[str, torch.Tensor], transport: Transport = Transport.FILESYSTEM,
        adapter: AdapterConfig | None = None,
    ) -> Activation:  # fmt: skip
        """Publishes and activates the next version; what is served afterwards has no name (see `serve`)."""
        sealed = await self.seal(state, transport, adapter)
        return await self.activate(sealed)

    async def seal(
        self, state: Mapping[str, torch.Tensor], transport: Transport = Transport.FILESYSTEM,
        adapter: AdapterConfig | None = None,
    ) -> int:  # fmt: skip
        """Publishes the next version, which the engine then prepares; returns its number."""
        version = self.version + 1
        data = save(dict(state))
        payload = memoryview(data)[8 + int.from_bytes(data[:8], "little") :]
        plans = manifests.plan_tensors(
            (key, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in state.items()
        )
        ordered = b"".join(_bytes(state[plan.name]) for plan in plans)
        assert bytes(payload) == ordered, "safetensors writes in the order of the byte stream"
        hashed = manifests.StreamHasher(plans, 2**20)
        hashed.update(payload)
        tensors, chunks = hashed.entries()
        files: tuple[FileEntry, ...] = ()
        if transport is Transport.FILESYSTEM:
            path = self._folder / f"step_{version}" / "weights.safetensors"
            path.parent.mkdir()
            path.write_bytes(data)
            files = (FileEntry(path=str(path), offset=0, num_bytes=len(payload)),)
        base = [(key, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in self.state("a").items()]
        manifest = manifests.build_manifest(
            run_id="main", epoch=1, version=version, transport=transport, tensors=tensors, chunks=chunks, files=files,
            adapter=adapter, base_layout=manifests.layout_signature(base),
        )  # fmt: skip

        async def pieces() -> Any:
            for chunk in chunks:
                piece = bytes(payload[chunk.offset : chunk.offset + chunk.length])
                yield Chunk(offset=chunk.offset, data=piece, crc32c=google_crc32c.value(piece))

        async with WeightSyncClient(self.hub) as hub:
            staged = await hub.create_version(manifest, pieces() if transport is Transport.STREAM else None)
            await hub.seal_version(run_id="main", epoch=1, version=version, artifact_id=staged.artifact_id)
        self.version, self.serving = version, ""
        return version

    async def activate(self, version: int) -> Activation:
        async with WeightSyncClient(self.hub) as hub:
            return await hub.activate_version(run_id="main", version=version, prepare_deadline_s=60.0)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_events(text: str) -> list[dict[str, Any]]:
    """The JSON of a server-sent stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]
