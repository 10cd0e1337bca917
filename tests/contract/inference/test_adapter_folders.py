"""Adapter folders of a vLLM engine, without vLLM: nothing of them outlives it, and a full disk is one sentence."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshrl.inference.engine import HostVersion
from meshrl.inference.vllm.adapters import AdapterStore
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterConfig
from small_disk import fill, mounted

DEADLINE_S = 30.0
ENGINE = """
import sys
from pathlib import Path
from meshrl.inference.vllm.adapters import AdapterStore
store = AdapterStore(8, folder=Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""
LAYOUT = (("q_proj.weight", "float32", (16, 32)),)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as folder:
        yield folder


def adapter(version: int) -> HostVersion:
    name = "base_model.model.q_proj.lora_"
    return HostVersion(
        version=version,
        tensors={f"{name}A.weight": torch.full((4, 32), version), f"{name}B.weight": torch.zeros(16, 4)},
        adapter=AdapterConfig(rank=4, lora_alpha=8.0, target_modules=("q_proj",)),
    )


def test_a_killed_engine_leaves_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENGINE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_without_room_is_refused_in_a_sentence_and_written_once_there_is_some(disk: Path) -> None:
    store = AdapterStore(8, folder=disk)
    try:
        store.write(adapter(1), LAYOUT, 1)
        filler = fill(disk)
        with pytest.raises(MeshError) as caught:
            store.write(adapter(2), LAYOUT, 2)
        assert caught.value.reason is Reason.OVERLOADED
        assert f"version 2 cannot be written to {disk} on this host" in caught.value.message
        assert "free some space there" in caught.value.message
        filler.unlink()
        folder = store.write(adapter(2), LAYOUT, 2)
        written = load_file(folder / "adapter_model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in adapter(2).tensors.items())
        store.remove(1)
        (root,) = disk.iterdir()
        assert [each.name for each in root.iterdir()] == ["2"]
    finally:
        store.close()
    assert list(disk.iterdir()) == []
