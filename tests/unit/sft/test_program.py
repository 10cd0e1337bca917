"""What `sft` does before it trains, or instead: --dry-run, --clean-output-dir and --bench."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.core.config import ConfigError
from meshrl.sft import main as program
from meshrl.sft.program import run_rank
from meshrl_examples.model import create_model

ROWS = [{"prompt": "ab", "completion": "ba"}] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_model(tmp_path / "model", seed=0, hidden_size=16, num_layers=1)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> int | str | None:
    named = ["--model.name", str(folder / "model"), "--data.name", str(folder / "train.jsonl")]
    monkeypatch.setattr(sys, "argv", ["sft", *named, "--output-dir", str(folder / "out"), *flags])
    with pytest.raises(SystemExit) as leaving:
        program.main()
    return leaving.value.code


def test_dry_run_looks_at_the_data_and_writes_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    validation = ["--val.data.name", str(folder / "train.jsonl"), "--val.data.seed", "3", "--val.data.seq-len", "9"]
    assert start(monkeypatch, folder, "--dry-run", "--data.batch-size", "4096", *validation) == 0
    out = capsys.readouterr().out
    assert "train: 4 rows; the first have 10 tokens on average, of which 30% are learned" in out
    assert "for about 4,096 tokens a step set data.batch_size to 2" in out
    assert "warning: no effect of val.data.seed: each validation takes all of the data once, in its order" in out
    written = (folder / "out" / "configs" / "sft.toml").read_text()
    assert "batch_size = 4096" in written
    assert "dry_run = true" not in written
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["configs"]


def test_dry_run_of_a_benchmark_reads_no_data(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    nowhere = ["--data.name", "nowhere.jsonl", "--tokenizer.chat-template", "nowhere"]
    assert start(monkeypatch, folder, "--bench", "--dry-run", *nowhere) == 0
    assert capsys.readouterr().out.startswith("dry run: the configuration is valid")


def test_benchmarks_on_fake_data_have_the_shape_of_data(folder: Path) -> None:
    shape = {"type": "fake", "seq_len": 64, "batch_size": 4, "micro_batch_size": 2}
    values = {"data": shape, "bench": {"steps": 2}, "model": {"name": str(folder / "model"), "device": "cpu"}}
    run_rank(program.SFTConfig.model_validate({**values, "output_dir": str(folder / "out")}), 0)
    report = json.loads((folder / "out" / "bench" / "trainer.json").read_text())
    assert (report["seq_len"], report["tokens_per_step"]) == (64, 256)
    bench = report["settings"]["bench"]
    assert (bench["rows"], bench["micro_batch_size"], bench["lengths"]) == (4, 2, "fixed")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.name", "nowhere.jsonl"], "data.name 'nowhere.jsonl': there is no such file"),
        (["--renderer.name", "qwen3"], "does not fit the tokenizer"),
        (["--tokenizer.chat-template", "mine"], "is neither a template that comes with sft (qwen3), nor a file"),
        (["--data.probabilities", "0.5,0.5"], "data.probabilities must have one number for each of the 1 subsets"),
        (["--data.micro-batch-size", "3"], "data.batch_size must be a multiple of data.micro_batch_size (3), got 8"),
    ],
)
def test_dry_run_says_what_is_wrong_in_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], message: str
) -> None:
    assert start(monkeypatch, folder, "--dry-run", *flags) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1 or "--help" in err
    assert not (folder / "out").exists()


def test_nodes_of_a_copy_are_refused_where_no_job_divides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    nodes = {"type": "multi_node", "num_train_nodes": 4, "nodes_per_fsdp_group": 2}
    config = program.SFTConfig.model_validate({"deployment": nodes})
    with pytest.raises(ConfigError, match=r"is for \[slurm\]; set model.dp_replicate instead, to 2"):
        program.submit_sft(config, dry_run=False)


def test_clean_output_dir_refuses_a_folder_with_the_data_and_spares_what_is_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (folder / "out" / "configs").mkdir(parents=True)
    (folder / "out" / "configs" / "sft.toml").write_text("")
    (folder / "out" / "mine.jsonl").write_text(json.dumps(ROWS[0]))
    data = str(folder / "out" / "mine.jsonl")
    assert start(monkeypatch, folder, "--clean-output-dir", "--data.name", data) == 2
    assert "mine.jsonl', which the run begins with" in capsys.readouterr().err
    assert (folder / "out" / "mine.jsonl").exists()
    assert start(monkeypatch, folder, "--clean-output-dir", "--ckpt.resume-step", "-1") == 2
    assert "clean_output_dir deletes the checkpoint that ckpt.resume_step asks for" in capsys.readouterr().err


def test_clean_output_dir_empties_the_folder_of_an_earlier_run(folder: Path) -> None:
    (folder / "out" / "configs").mkdir(parents=True)
    (folder / "out" / "configs" / "sft.toml").write_text("")
    (folder / "out" / "metrics.jsonl").write_text("{}")
    config = program.SFTConfig.model_validate({"output_dir": str(folder / "out"), "clean_output_dir": True})
    program._prepare(config)
    left = {str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*")}
    assert left == {"logs", "logs/attempt_1", "logs/latest"}  # of this start
