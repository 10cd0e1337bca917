from pathlib import Path

import torch._dynamo.utils as dynamo

from checkpoint_kit import build, save_model
from meshrl.trainer.build import compile_kernels
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.fake_data import fake_batch


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
