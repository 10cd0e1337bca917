"""What a model takes to be trained, and what is said when it does not fit."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from meshrl.models.load import ModelError
from meshrl.training import auto_settings
from meshrl.training.auto_settings import resolve_auto
from meshrl.training.config import OptimConfig
from meshrl.training.memory_estimate import check_has_device, memory_need
from meshrl.training.model_config import LoraConfig, TrainerModelConfig
from meshrl.training.parallel.plan import ParallelPlan
from meshrl.training.parallel.rank_group import RankGroup

HIDDEN, LAYERS, VOCAB = 64, 2, 128
# Embeddings (tied), and per layer: q, k, v, o with 16 numbers a head, three of the MLP, two norms and those of q and k.
PER_LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 2 * HIDDEN + 2 * HIDDEN + 2 * 16
PARAMETERS = VOCAB * HIDDEN + LAYERS * PER_LAYER + HIDDEN


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A configuration without weights: nothing of the model is ever made."""
    save(tmp_path, hidden=HIDDEN)
    return str(tmp_path)


def save(folder: Path, *, hidden: int) -> None:
    Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 16,
        head_dim=16,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)


def test_full_training_takes_sixteen_bytes_a_parameter(folder: str) -> None:
    need = memory_need(TrainerModelConfig(name=folder, device="cpu"), OptimConfig(), RankGroup())
    assert need.parameters == PARAMETERS
    assert (need.weights, need.gradients, need.optimizer) == (4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS)


def test_ranks_that_share_products_each_hold_the_norms(folder: str) -> None:
    config, group = TrainerModelConfig(name=folder, device="cpu"), RankGroup(ParallelPlan(dp_shard=2, tp=2))
    need, norms = memory_need(config, OptimConfig(), group), LAYERS * (2 * HIDDEN + 2 * 16) + HIDDEN
    assert need.parameters == PARAMETERS
    assert need.weights == 4 * ((PARAMETERS - norms) / 4 + norms / 2)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (OptimConfig(type="muon"), 4),
        (OptimConfig(type="sgd"), 4),
        (OptimConfig(type="sgd", momentum=0.0), 0),
    ],
)
def test_optimizers_with_less_state_take_less(folder: str, optim: OptimConfig, expected: int) -> None:
    need = memory_need(TrainerModelConfig(name=folder, device="cpu"), optim, RankGroup())
    assert need.optimizer == expected * PARAMETERS


def test_adapters_leave_the_model_without_gradients_and_optimizer_state(folder: str) -> None:
    lora = LoraConfig(rank=2, target_modules=["q_proj"])
    config = TrainerModelConfig(name=folder, device="cpu", lora=lora)
    need = memory_need(config, OptimConfig(), RankGroup())
    adapters = LAYERS * 2 * (HIDDEN + HIDDEN)
    assert need.parameters == PARAMETERS + adapters
    assert (need.gradients, need.optimizer) == (4 * adapters, 8 * adapters)


def test_modules_beside_adapters_are_held_and_trained_in_float32(folder: str) -> None:
    lora = LoraConfig(rank=2, target_modules=["q_proj"])
    needs = [
        memory_need(
            TrainerModelConfig(name=folder, device="cpu", dtype="bfloat16", lora=each), OptimConfig(), RankGroup()
        )
        for each in (lora, lora.model_copy(update={"modules_to_save": ["o_proj"]}))
    ]
    whole = LAYERS * HIDDEN * HIDDEN
    assert [needs[1].weights - needs[0].weights, needs[1].gradients - needs[0].gradients] == [2 * whole, 4 * whole]
    assert needs[1].optimizer - needs[0].optimizer == 8 * whole


def test_state_on_the_host_does_not_count(folder: str) -> None:
    config = TrainerModelConfig(name=folder, device="cpu", optim_cpu_offload=True)
    assert memory_need(config, OptimConfig(), RankGroup()).total == 8 * PARAMETERS
    config = TrainerModelConfig(name=folder, device="cpu", fsdp_cpu_offload=True)
    assert memory_need(config, OptimConfig(), RankGroup()).total == 0


def test_a_trainer_that_publishes_holds_a_snapshot_in_the_published_type(folder: str) -> None:
    full = TrainerModelConfig(name=folder, device="cpu", dtype="bfloat16")
    assert memory_need(full, OptimConfig(), RankGroup()).snapshot == 0
    need = memory_need(full, OptimConfig(), RankGroup(), publishes=True)
    assert (need.snapshot, need.total) == (2 * PARAMETERS, 18 * PARAMETERS)
    shards = RankGroup(ParallelPlan(dp_shard=2, local_world_size=2))
    assert memory_need(full, OptimConfig(), shards, publishes=True).snapshot == PARAMETERS
    for elsewhere in ({"fsdp_cpu_offload": True}, {"lora": LoraConfig(rank=2, target_modules=["q_proj"])}):
        config = TrainerModelConfig.model_validate({**full.model_dump(), **elsewhere})
        assert memory_need(config, OptimConfig(), RankGroup(), publishes=True).snapshot == 0


def test_a_model_that_does_not_fit_is_refused_with_both_sizes_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, hidden=8192)
    monkeypatch.setattr(auto_settings, "available_bytes", lambda device: 2**30)
    config = TrainerModelConfig(name=str(tmp_path), device="cpu")
    with pytest.raises(ModelError) as caught:
        resolve_auto(config, OptimConfig(), RankGroup(), seq_len=64, max_logits_mib=None)
    message = str(caught.value)
    assert "to train its 1.34 billion parameters takes 20 GiB of memory on cpu" in message
    assert "(weights 5 GiB, gradients 5 GiB, optimizer 10 GiB; activations not counted), and 1 GiB" in message
    assert "deployment.num_train_gpus" in message


def test_a_rank_without_a_gpu_of_its_own_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_has_device(torch.device("cuda"), {"LOCAL_RANK": "1"})
    check_has_device(torch.device("cpu"), {"LOCAL_RANK": "7"})
    with pytest.raises(ModelError, match=r"no GPU for rank 2 of this machine, which shows 2; lower deployment"):
        check_has_device(torch.device("cuda"), {"LOCAL_RANK": "2"})
