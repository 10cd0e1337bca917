"""On a GPU: adapters over half-precision weights, and optimizers whose state waits in pinned host memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.models.lora import adapted_layers, adapter_state, is_adapter
from meshrl.models.state import gather_state
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.fake_data import fake_batch
from meshrl.training.build import build_learner
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import OptimConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from tiny_qwen3 import FOR_A_GPU, save_tiny_qwen3
from trained import Trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
VOCAB = FOR_A_GPU["vocab_size"]


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    parallel = RankGroup.start({}, device=torch.device("cuda"))
    yield parallel
    parallel.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), **FOR_A_GPU)


def build(model: str, group: RankGroup, kind: str = "adamw", **settings: Any) -> Trained:
    config = TrainerModelConfig.model_validate({"name": model, "dtype": "bfloat16", **settings})
    return Trained.by(
        build_learner(config, parallel=group),
        Objective(loss=cross_entropy_loss),
        OptimConfig.model_validate({"type": kind, "lr": 1e-2 if kind == "sgd" else 1e-3}),
    )


def losses(trained: Trained, steps: int = 4) -> list[float]:
    bench = BenchConfig(rows=2, lengths="variable", median_length=900)
    batch = fake_batch(bench, seq_len=4096, vocab_size=VOCAB, dp_size=1, seed=0)
    return [trained.step(batch).loss for _ in range(steps)]


def state(trained: Trained) -> list[torch.Tensor]:
    """This rank's part of the state tensors."""
    values = [v for part in trained.run.optimizer.parts for state in part.state.values() for v in state.values()]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values if value.ndim]


@pytest.mark.parametrize("settings", [{}, {"compile": {"fullgraph": True}, "ac": {"mode": "selective"}}], ids=str)
def test_adapters_train_and_the_half_precision_base_stays(
    settings: dict[str, Any], group: RankGroup, model: str
) -> None:
    trained = build(model, group, lora={"rank": 8, "alpha": 16}, **settings)
    before, base = adapter_state(trained.model), gather_state(trained.model)
    curve = losses(trained)
    assert curve[-1] < curve[0] - 0.01
    assert {is_adapter(n): p.dtype for n, p in trained.model.named_parameters()} == {
        True: torch.float32,
        False: torch.bfloat16,
    }
    after, merged = adapter_state(trained.model), gather_state(trained.model)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items() if name.endswith("lora_B"))
    adapted = {f"{name}.weight" for name in adapted_layers(trained.model)}
    assert len(adapted) == 14
    for name, tensor in merged.items():
        layer = name.removesuffix(".weight")
        if name not in adapted:
            assert torch.equal(tensor, base[name]), name
            continue
        exact = base[name].double() + 2.0 * after[f"{layer}.lora_B"].double() @ after[f"{layer}.lora_A"].double()
        torch.testing.assert_close(tensor.double(), exact, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_state_on_the_host_changes_no_number(kind: str, group: RankGroup, model: str) -> None:
    plain, offloaded = build(model, group, kind), build(model, group, kind, optim_cpu_offload=True)
    assert losses(offloaded) == pytest.approx(losses(plain), rel=1e-4)
    assert {tensor.device.type for tensor in state(plain)} == {"cuda"}
    assert {(tensor.device.type, tensor.is_pinned()) for tensor in state(offloaded)} == {("cpu", True)}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_on_the_host_is_saved_and_restored_there(kind: str, group: RankGroup, model: str, tmp_path: Path) -> None:
    trained = build(model, group, kind, optim_cpu_offload=True)
    losses(trained, steps=2)
    Checkpointer(*trained, tmp_path, tokenizer=None).save()
    resumed = build(model, group, kind, optim_cpu_offload=True)
    assert Checkpointer(*resumed, tmp_path, tokenizer=None).restore(2) == 2
    assert {(tensor.device.type, tensor.is_pinned()) for tensor in state(resumed)} == {("cpu", True)}
    assert losses(resumed, steps=2) == pytest.approx(losses(trained, steps=2), rel=1e-5)
