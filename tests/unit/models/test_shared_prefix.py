"""A prompt that a group shares is computed once, with the loss and the gradients of rows that repeat it."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config

from meshrl.algorithms.losses import dppo_kl_loss
from meshrl.algorithms.objective import Normaliser, Objective
from meshrl.algorithms.packing import Packing, TrainSample, pack_samples, shared_prefix_ratio
from meshrl.core.config import ConfigError
from meshrl.models.attention import Kernels
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.shared_prefix import PrefixPlan
from meshrl.models.shares import ContextShare
from meshrl.trainer.build import MIN_SHARED_PREFIX, min_shared_prefix
from meshrl.trainer.service import check_batch
from meshrl.training.config import OptimConfig
from meshrl.training.learner import Learner, to_row
from meshrl.training.model_config import ActivationCheckpointConfig, TrainerModelConfig
from meshrl.training.parallel.fsdp import prepare_blocks
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Batch
from trained import Trained, apply_lora

VOCAB = 32
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=2, n_head=4,
                attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
            )
        )  # fmt: skip
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True))


def groups(seed: int, *, prompts: int = 3, size: int = 5) -> list[TrainSample]:
    """Groups of ragged completions; the last completions of a group repeat a first turn that they do not train."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(prompts):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 60)))
        turn = rng.integers(0, VOCAB, 7)
        for index in range(size):
            history = np.concatenate([prompt, turn]) if index == size - 1 else prompt
            length = int(rng.integers(1, 40))
            tokens = np.concatenate([history, rng.integers(0, VOCAB, length)]).astype(np.int32)
            samples.append(
                TrainSample(
                    token_ids=tokens,
                    loss_mask=np.arange(len(tokens)) >= len(history),
                    logprobs=(rng.normal(scale=0.3, size=len(tokens)) - np.log(VOCAB) - 1).astype(np.float32),
                    advantage=float(rng.normal()),
                    temperature=float(rng.uniform(0.5, 1.5)),
                    group=str(group),
                )
            )
    return samples


def test_the_keys_of_a_sample_are_its_prefix_and_its_own_tokens() -> None:
    (row,) = pack_samples(groups(0), seq_len=4096, min_shared_prefix=0.0).micro_batches
    assert row.prefix_tokens is not None
    assert row.prefix_samples is not None
    assert row.shared_tokens
    offsets = row.sample_offsets
    plan = PrefixPlan.from_samples(offsets, row.prefix_tokens, row.prefix_samples, torch.device("cpu"))
    assert plan is not None
    keys = torch.split(plan.whole_index, plan.whole_offsets.diff().tolist())
    for sample, (prefix, root) in enumerate(zip(row.prefix_tokens, row.prefix_samples, strict=True)):
        before = range(offsets[root], offsets[root] + prefix)
        assert keys[sample].tolist() == [*before, *range(offsets[sample], offsets[sample + 1])]
    assert plan.whole_index[plan.own_place].tolist() == list(range(len(row.token_ids)))
    places = [*plan.own_place.tolist(), *plan.prefix_place.tolist()]
    assert sorted(places) == list(range(len(plan.whole_index)))
    assert plan.host[2] == max(map(len, keys))


def test_a_row_that_is_padded_for_ranks_has_its_padding_among_the_keys() -> None:
    (row,) = pack_samples(groups(0), seq_len=4096, min_shared_prefix=0.0).micro_batches
    share = ContextShare(group="", size=4, rank=0)
    assert share.missing(len(row.token_ids))
    packed = to_row(row, torch.device("cpu"), Kernels(context=share))
    plan, tokens = packed.layout.prefixes, len(packed.token_ids)
    assert plan is not None
    assert tokens == len(row.token_ids) + share.missing(len(row.token_ids))
    assert plan.whole_index[plan.own_place].tolist() == list(range(tokens))
    assert len(plan.whole_offsets) == len(packed.layout.offsets)


def learner(model: PreTrainedModel, ac: str | None = None) -> Trained:
    policy = PackedPolicy(model)
    if ac is not None:
        prepare_blocks(policy, TrainerModelConfig(ac=ActivationCheckpointConfig.model_validate({"mode": ac})))
    loss = partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)
    return Trained.by(
        Learner(policy),
        Objective(loss=loss, normaliser=Normaliser.SEQUENCE),
        OptimConfig(type="sgd", lr=1.0, momentum=0.0, max_norm=None),
    )


def stepped(model: PreTrainedModel, packing: Packing, ac: str | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step and the gradients: what a step of plain SGD at rate 1 takes off the weights."""
    trained = learner(model, ac)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = trained.step(packing.micro_batches).loss
    return loss, {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}


def assert_same_step(build_model: Any, samples: list[TrainSample], *, seq_len: int, ac: str | None = None) -> Packing:
    repeated = pack_samples(samples, seq_len=seq_len)
    shared = pack_samples(samples, seq_len=seq_len, min_shared_prefix=0.0)
    expected, gradients = stepped(build_model(), repeated)
    loss, found = stepped(build_model(), shared, ac)
    assert loss == pytest.approx(expected, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert any(bool(gradient.abs().max() > 1e-4) for gradient in gradients.values())
    return shared


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("seed", range(3))
def test_shared_prompts_give_the_same_loss_and_gradients(name: str, seed: int) -> None:
    shared = assert_same_step(partial(build, name), groups(seed), seq_len=200)
    assert shared_prefix_ratio(shared.micro_batches) > 0.1


def test_rows_hold_several_groups_and_a_group_several_rows() -> None:
    samples = groups(5, prompts=6, size=4)
    wide = assert_same_step(partial(build, "qwen3"), samples, seq_len=4096)
    assert len(wide.micro_batches) == 1
    narrow = assert_same_step(partial(build, "qwen3"), samples, seq_len=110)
    assert len(narrow.micro_batches) > 4
    assert 0 < shared_prefix_ratio(narrow.micro_batches) < shared_prefix_ratio(wide.micro_batches)


@pytest.mark.parametrize("ac", ["full", "attention", "selective"])
def test_checkpointed_blocks_compute_shared_prompts_again(ac: str) -> None:
    assert_same_step(partial(build, "qwen3"), groups(1), seq_len=300, ac=ac)


def test_adapters_learn_the_same_from_shared_prompts() -> None:
    def with_adapters() -> PreTrainedModel:
        model = build("qwen3")
        apply_lora(model, rank=4, alpha=8.0, dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    assert_same_step(with_adapters, groups(2), seq_len=300)


def test_logprobs_of_shared_prompts_in_bfloat16_are_as_near_as_rounding() -> None:
    model = build("qwen3")
    samples = groups(3)
    exact, found = (
        Trained.by(
            Learner(PackedPolicy(model, compute_dtype=dtype)),
            Objective(loss=partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)),
            OptimConfig(),
        ).evaluate(pack_samples(samples, seq_len=400, min_shared_prefix=share).micro_batches)
        for dtype, share in ((torch.float32, None), (torch.bfloat16, 0.0))
    )
    assert np.abs(np.sort(exact.logprobs) - np.sort(found.logprobs)).mean() < 0.02


def test_models_that_cannot_share_say_why() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    policy = PackedPolicy(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)))
    assert policy.prefix_reason == "its attention has sliding windows"
    assert min_shared_prefix("auto", policy) is None
    assert min_shared_prefix(False, PackedPolicy(build("qwen3"))) is None
    assert min_shared_prefix("auto", PackedPolicy(build("qwen3"))) == MIN_SHARED_PREFIX
    assert min_shared_prefix(True, PackedPolicy(build("qwen3"))) == 0.0
    with pytest.raises(
        ConfigError, match=r"trainer.share_prefixes is true.*sliding windows; set it to 'auto' or false"
    ):
        min_shared_prefix(True, policy)


def test_a_trainer_that_takes_no_prefixes_refuses_them_by_row(tmp_path: Path) -> None:
    packing = pack_samples(groups(0), seq_len=4096, min_shared_prefix=0.0)
    batch = Batch(
        run_id="r", step=1, micro_batches=packing.micro_batches, loss_tokens=packing.loss_tokens, environments=("e",)
    )
    check_batch(batch, vocab_size=VOCAB, takes_prefixes=True)
    with pytest.raises(MeshError, match="takes no shared prefixes") as refused:
        check_batch(batch, vocab_size=VOCAB, takes_prefixes=False)
    assert [violation.field for violation in refused.value.violations] == ["micro_batches[0].prefix_tokens"]
