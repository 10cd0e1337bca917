"""A folder to fine-tune in: a tiny model and 64 conversations."""

import json
import random
from pathlib import Path

import pytest
from meshrl.environments.reverse_text.demonstrations import demonstrations
from meshrl.environments.reverse_text.sentences import sentences

from meshrl_examples.model import create_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    create_model(folder / "model", seed=0, hidden_size=32, num_layers=1)
    rows = demonstrations(sentences("train")[:64], share=1.0, source=random.Random(0))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
