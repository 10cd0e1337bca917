"""The whole of `sft` on a very small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from meshrl.core.config.shared import LogConfig, ModelConfig
from meshrl.models.load import load_model, load_tokenizer
from meshrl.sft.config import DataConfig, LossMaskConfig, SFTConfig
from meshrl.sft.data.conversations import DataError
from meshrl.sft.program import train
from meshrl.training.config import CheckpointConfig
from meshrl.training.parallel.rank_group import RankGroup
from sft_kit import configure, make_folder, records
from tensorboard_values import tensorboard_values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("sft"))


def test_training_lowers_the_loss_and_leaves_a_model_that_loads(folder: Path, tmp_path: Path) -> None:
    train(configure(folder, tmp_path), (), RankGroup())
    steps = records(tmp_path)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss/mean"] < steps[0]["loss/mean"] - 1.0
    assert [record["step"] for record in steps if "val/loss" in record] == [3, 6]
    assert steps[5]["val/loss"] < steps[2]["val/loss"]
    named = {
        "loss/mean", "optim/grad_norm", "optim/lr", "optim/zero_grad_ratio", "perf/throughput",
        "perf/throughput_per_gpu", "perf/mfu", "perf/peak_memory", "progress/epoch", "progress/num_samples",
        "progress/num_tokens", "time/load_data", "time/step", "time/forward_backward", "time/save_ckpt",
    }  # fmt: skip
    assert named <= set(steps[0])
    saved = ModelConfig(name=str(tmp_path / "weights" / "final"), device="cpu")
    assert load_model(saved).num_parameters() > 0
    assert load_tokenizer(saved).chat_template
    assert (tmp_path / "weights" / "final").resolve() == tmp_path / "weights" / "step_6"


def test_samples_and_distributions_of_a_step_are_logged(folder: Path, tmp_path: Path) -> None:
    train(configure(folder, tmp_path, max_steps=10, val=None, log=LogConfig(tensorboard=True)), (), RankGroup())
    found = tensorboard_values(tmp_path / "tensorboard")
    for name, mean in (("loss", "loss/mean"), ("entropy", "entropy/all/mean")):
        histogram = found[f"distributions/{name}"].histo
        assert histogram.num > 10
        assert histogram.sum / histogram.num == pytest.approx(records(tmp_path)[9][mean], rel=1e-3)
    texts = [value.tensor.string_val[0].decode() for tag, value in found.items() if tag.startswith("samples/")]
    assert 2 <= len(texts) <= 8
    for text in texts:
        name, prompt, completion = text.split("\n\n    ")
        assert name == str(folder / "train.jsonl")
        assert "Reverse the text." in prompt
        assert completion.removesuffix("<|im_end|>")[::-1] in prompt


def test_a_stopped_run_saves_what_it_has(folder: Path, tmp_path: Path) -> None:
    train(configure(folder, tmp_path), ("SIGTERM",), RankGroup())
    assert (tmp_path / "weights" / "step_0" / "model.safetensors").is_file()


def test_while_a_run_goes_another_way_no_weights_are_called_final(folder: Path, tmp_path: Path) -> None:
    final, seen = tmp_path / "weights" / "final", []

    class Watched(list[str]):
        def __bool__(self) -> bool:  # before each step
            seen.append(final.is_symlink())
            return False

    train(configure(folder, tmp_path, max_steps=4, ckpt=CheckpointConfig(interval=2)), (), RankGroup())
    assert final.resolve().name == "step_4"
    again = configure(folder, tmp_path, max_steps=4, ckpt=CheckpointConfig(resume_step=2))
    train(again, Watched(), RankGroup())
    assert seen[:2] == [False, False]
    assert final.resolve().name == "step_4"


def test_a_bad_row_late_in_the_data_ends_with_the_weights_of_the_steps_before(folder: Path, tmp_path: Path) -> None:
    rows = (folder / "train.jsonl").read_text().splitlines()[:39]
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*rows, json.dumps({"messages": [{"content": "no role"}]})]))
    data = DataConfig(name=str(bad), batch_size=2, seq_len=64, shuffle=False)
    with pytest.raises(
        DataError, match=r"bad.jsonl, line 40, .*a message needs a role.*weights after step (\d+) are in"
    ):
        train(configure(folder, tmp_path / "out", data=data, max_steps=500), (), RankGroup())
    steps = records(tmp_path / "out")[-1]["step"]
    assert steps > 2
    assert (tmp_path / "out" / "weights" / f"step_{steps}" / "model.safetensors").is_file()


def test_a_run_that_goes_on_over_other_data_names_the_difference(folder: Path, tmp_path: Path, said: list[str]) -> None:
    rows = (folder / "train.jsonl").read_text().splitlines()
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join(rows[:8]))
    data = DataConfig(name=str(mine), batch_size=2, seq_len=256)
    first = configure(folder, tmp_path / "out", data=data, max_steps=2, ckpt=CheckpointConfig(interval=2))
    train(first, (), RankGroup())
    again = configure(folder, tmp_path / "out", data=data, max_steps=4, ckpt=CheckpointConfig(resume_step=2))
    train(again, (), RankGroup())
    assert not [line for line in said if "is not the data of the checkpoint" in line]
    mine.write_text("\n".join(rows[:3]))
    train(again, (), RankGroup())
    (line,) = [line for line in said if "is not the data of the checkpoint" in line]
    assert "train had 8 rows, crc32" in line
    assert "now 3 rows, crc32" in line


def test_before_training_rows_are_shown_and_what_is_not_used_is_listed_once(
    folder: Path, tmp_path: Path, said: list[str]
) -> None:
    messages = [{"role": "user", "content": "ab", "turn": 1}, {"role": "assistant", "content": "ba", "turn": 2}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': messages, 'score': 1, 'tools': None})}\n" * 12)
    data = DataConfig(name=str(tmp_path / "rows.jsonl"), batch_size=1, seq_len=64)
    train(configure(folder, tmp_path / "out", data=data, val=None, max_steps=1), (), RankGroup())
    (row,) = [line for line in said if "row 0: " in line]
    assert "<|im_start|>assistant\n[[ba<|im_end|>]]\n" in row
    assert any("learned, found by prefixes that the chat template renders" in line for line in said)
    unused = [line.partition("not used: ")[2] for line in said if "not used" in line]
    assert unused == ["'turn', which the chat template leaves out", "column 'score'"]


def test_a_mask_without_roles_is_refused() -> None:
    with pytest.raises(ValidationError, match="loss_mask leaves no role to learn from"):
        SFTConfig(loss_mask=LossMaskConfig(assistant=False))
