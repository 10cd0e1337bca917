from pathlib import Path

import pytest
import torch
import torch._dynamo.utils as dynamo

from checkpoint_kit import build, save_model
from meshrl.trainer.build import compile_kernels
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.fake_data import fake_batch
from meshrl.wire.types import MicroBatch


def test_rows_of_the_run_need_no_graph_that_the_start_has_not_made(tmp_path: Path) -> None:
    model = save_model(tmp_path, num_hidden_layers=1)
    trained = build(model, {"compile": {"backend": "eager"}})
    compile_kernels(trained.learner, seq_len=256)
    made = dynamo.counters["stats"]["unique_graphs"]
    assert made > 0
    vocab_size = trained.model.config.vocab_size
    for seed, seq_len in enumerate((256, 150, 200)):
        rows = fake_batch(BenchConfig(lengths="variable"), seq_len=seq_len, vocab_size=vocab_size, dp_size=1, seed=seed)
        trained.step(rows)
    assert dynamo.counters["stats"]["unique_graphs"] == made


def test_a_row_without_room_does_not_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build(save_model(tmp_path, num_hidden_layers=1)).learner
    passed: list[int] = []

    def warm_up(rows: list[MicroBatch]) -> None:
        if len(rows[0].token_ids) > 100:
            raise torch.OutOfMemoryError("none left")
        passed.append(len(rows[0].token_ids))

    monkeypatch.setattr(learner, "warm_up", warm_up)
    compile_kernels(learner, seq_len=256)
    assert passed == [64, 32]
