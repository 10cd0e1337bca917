"""A folder to fine-tune in, a configuration for it, and what a run of it recorded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from meshrl.environments.reverse_text.demonstrations import demonstrations
from meshrl.environments.reverse_text.sentences import sentences

from meshrl.sft.config import DataConfig, SFTConfig, ValConfig
from meshrl.training.config import OptimConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl_examples.model import create_model


def make_folder(folder: Path) -> Path:
    """A tiny model and 64 conversations each to train and to validate on."""
    create_model(folder / "model", seed=0, hidden_size=32, num_layers=1)
    for name, texts in (("train", sentences("train")), ("val", sentences("held_out"))):
        rows = demonstrations(texts[:64], share=1.0, source=random.Random(0))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configure(folder: Path, output_dir: Path, **changes: Any) -> SFTConfig:
    values: dict[str, Any] = {
        "model": TrainerModelConfig(name=str(folder / "model"), device="cpu"),
        "data": DataConfig(name=str(folder / "train.jsonl"), batch_size=2, seq_len=256),
        "val": ValConfig(interval=3, data=DataConfig(name=str(folder / "val.jsonl"), seq_len=1024)),
        "optim": OptimConfig(lr=1e-2),
        "max_steps": 6,
        "torch_threads": 1,
        "output_dir": output_dir,
    }
    return SFTConfig(**(values | changes))


def records(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
