"""Fine-tuning that stops and goes on: the same steps on the same data, the same weights and optimizer, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from meshrl.sft.config import DataConfig, ValConfig
from meshrl.sft.program import train
from meshrl.training.config import CheckpointConfig, SchedulerConfig
from meshrl.training.model_config import LoraConfig, TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from sft_kit import configure, records

VOLATILE = ("time", "perf/")


def run(folder: Path, output_dir: Path, lora: LoraConfig | None, data: DataConfig | None = None, **ckpt: Any) -> None:
    config = configure(
        folder,
        output_dir,
        model=TrainerModelConfig(name=str(folder / "model"), device="cpu", lora=lora),
        **({} if data is None else {"data": data}),
        val=ValConfig(interval=5, data=DataConfig(name=str(folder / "train.jsonl"), seq_len=256)),
        scheduler=SchedulerConfig(type="linear", warmup_steps=3),
        max_steps=20,
        ckpt=CheckpointConfig(interval=10, **ckpt),
    )
    train(config, (), RankGroup())


def state(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    reader = FileSystemReader(output_dir / f"checkpoints/step_{step}/trainer")
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def test_a_mixture_with_loader_processes_resumes_to_the_bit(folder: Path, tmp_path: Path) -> None:
    """Packed, weighed by probabilities, with a template of its own, and with another number of processes."""
    mixed = tmp_path / "data"
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("many", rows[:50]), ("few", rows[50:])):
        (mixed / name).mkdir(parents=True)
        (mixed / name / "train.jsonl").write_text("".join(part))
    data = {
        "name": str(mixed), "subsets": ["many", "few"], "probabilities": [0.75, 0.25], "batch_size": 2,
        "micro_batch_size": 2, "seq_len": 256,
    }  # fmt: skip
    lora = LoraConfig(rank=4, dropout=0.2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(folder, whole, lora, data=DataConfig(**data))
    shutil.copytree(whole / "checkpoints" / "step_10", parts / "checkpoints" / "step_10")
    run(folder, parts, lora, data=DataConfig(**data, num_workers=2), resume_step=10)
    compare(whole, parts)
    last = records(parts)[-1]
    assert 0.6 < last["progress/many/ratio_samples"] < 0.9
    assert last["progress/many/ratio_samples"] + last["progress/few/ratio_samples"] == pytest.approx(1.0)
    assert last["progress/many/ratio_tokens"] + last["progress/few/ratio_tokens"] == pytest.approx(1.0)


def test_ten_steps_resumed_for_ten_are_twenty(folder: Path, tmp_path: Path) -> None:
    """Saved in the background."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(folder, whole, None, save_async=True)
    shutil.copytree(whole / "checkpoints" / "step_10", parts / "checkpoints" / "step_10")
    torch.manual_seed(99)  # a new process has drawn other numbers until it restores
    run(folder, parts, None, resume_step=-1)
    compare(whole, parts)


def compare(whole: Path, parts: Path) -> None:
    """Steps 11 to 20 of both, and what they left."""
    expected, got = records(whole), records(parts)
    assert [record["step"] for record in got] == list(range(11, 21))
    for ours, theirs in zip(got, expected[10:], strict=True):
        assert {key: value for key, value in ours.items() if not key.startswith(VOLATILE)} == {
            key: value for key, value in theirs.items() if not key.startswith(VOLATILE)
        }
    assert len({record["optim/lr"] for record in got}) == 10
    ours, theirs = state(parts, 20), state(whole, 20)
    assert any(name.startswith("optimizer/exp_avg/") for name in ours)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert (parts / "weights/step_20/model.safetensors").read_bytes() == (
        whole / "weights/step_20/model.safetensors"
    ).read_bytes()
