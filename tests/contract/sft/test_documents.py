"""The commands of the documents as a user pastes them, with a local dataset in the place of the hub's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from conversations import load_conversations
from meshrl.sft.data.config import DataConfig
from sft_kit import make_folder, records

FILE = """
max_steps = 100

[model]
name = "{model}"

[data]
name = "{data}"
seq_len = 256
batch_size = 2

[optim]
lr = 2e-3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a dataset as the hub has them (a folder of parquet files), and a file like the documents'."""
    folder = make_folder(tmp_path_factory.mktemp("documents"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "dataset" / "data").mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(folder / "dataset" / "data" / "train-00000-of-00001.parquet")
    (folder / "sft.toml").write_text(FILE.format(model=folder / "model", data=folder / "dataset"))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def sft(folder: Path, command: str) -> str:
    """Runs what stands after `uv run sft`."""
    script = str(Path(sys.executable).with_name("sft"))
    environ = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "PRIME_OUTPUT_DIR": str(folder / "out")}
    ran = subprocess.run(
        [script, *command.split()], cwd=folder, env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_a_run_in_two_parts_with_wandb(folder: Path) -> None:
    sft(folder, "@ sft.toml --wandb --max-steps 20 --ckpt")
    assert (folder / "out" / "checkpoints" / "step_20" / "trainer").is_dir()
    sft(folder, "@ sft.toml --max-steps 40 --ckpt.resume-step 20")
    steps = records(folder / "out")
    assert [record["step"] for record in steps] == list(range(1, 41))
    assert steps[-1]["loss/mean"] < steps[0]["loss/mean"]
    assert steps[-1]["progress/num_samples"] > steps[19]["progress/num_samples"]
    assert list((folder / "out" / "wandb").glob("offline-run-*"))
    assert (folder / "out" / "weights" / "final" / "model.safetensors").is_file()


def test_a_dataset_saved_by_datasets_and_one_of_parquet_files_are_the_same_rows(folder: Path, tmp_path: Path) -> None:
    parquet = folder / "dataset" / "data" / "train-00000-of-00001.parquet"
    Dataset.from_parquet(str(parquet), cache_dir=str(tmp_path)).save_to_disk(tmp_path / "saved")
    names = [str(folder / "dataset"), str(parquet), str(tmp_path / "saved")]
    first, *others = [load_conversations(DataConfig(name=name)) for name in names]
    assert len(first) == 64
    assert others == [first, first]


def test_columns_that_other_rows_have_do_not_come_as_none(tmp_path: Path) -> None:
    """A dataset's columns are typed: a message without tool calls has them as None there."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    Dataset.from_list([{"messages": messages, "tools": json.dumps([call["function"]])}]).save_to_disk(tmp_path / "rows")
    (conversation,) = load_conversations(DataConfig(name=str(tmp_path / "rows")))
    assert conversation.messages[0] == {"role": "user", "content": "ab"}
    arguments = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [arguments]}
    assert conversation.tools == ({"type": "function", "function": call["function"]},)
