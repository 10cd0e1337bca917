from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from meshrl.algorithms.losses import Loss, LossInputs, LossOutput, aipo_loss, cross_entropy_loss, dppo_kl_loss
from meshrl.algorithms.objective import Normaliser, Objective, objective_loss
from meshrl.algorithms.objective import count as count_of
from meshrl.algorithms.packing import Packing, TrainSample, pack_samples
from meshrl.models.experts import active_parameters
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.state import gather_state
from meshrl.training.bench.throughput import peak_flops, step_flops
from meshrl.training.config import OptimConfig
from meshrl.training.learner import Learner, StepError, UpdateError, to_tokens
from meshrl.training.run_state import TokenRecord
from tiny_qwen3 import tiny_qwen3
from trained import Trained

VOCAB = 16


def learner(
    loss: Loss = cross_entropy_loss, normaliser: Normaliser = Normaliser.TOKEN, **optim: float | str | None
) -> Trained:
    return Trained.by(
        Learner(PackedPolicy(tiny_qwen3(vocab_size=VOCAB))),
        Objective(loss=loss, normaliser=normaliser),
        OptimConfig(**{"lr": 1e-2, **optim}),
    )


def moments(trained: Trained) -> str:
    return repr([part.state_dict() for part in trained.run.optimizer.parts])


def not_finite_loss(inputs: LossInputs) -> LossOutput:
    return aipo_loss(replace(inputs, inference_logprobs=inputs.logprobs * float("nan")), delta=2.0)


def packed(*, seq_len: int, dp_size: int = 1, count: int = 8) -> Packing:
    rng = np.random.default_rng(0)
    samples = []
    for index in range(count):
        length = int(rng.integers(4, 12))
        samples.append(
            TrainSample(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=np.arange(length) >= 2,
                logprobs=-rng.exponential(size=length).astype(np.float32),
                advantage=float(rng.normal()),
                env_index=index % 2,
            )
        )
    return pack_samples(samples, seq_len=seq_len, dp_size=dp_size)


def test_accumulated_micro_batches_equal_one_big_batch() -> None:
    results = []
    for seq_len in (12, 25, 1000):
        trained = learner(lambda inputs: aipo_loss(inputs, delta=2.0))
        packing = packed(seq_len=seq_len)
        result = trained.step(packing.micro_batches)
        results.append((len(packing.micro_batches), result, gather_state(trained.model)))
    assert len({count for count, _, _ in results}) == 3
    _, first, weights = results[0]
    for _, result, other in results[1:]:
        assert result.loss == pytest.approx(first.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=1e-4)


def test_the_host_never_asks_the_device_in_the_midst_of_a_row() -> None:
    """A tensor on meta has no values that could answer."""
    samples = [
        TrainSample(
            token_ids=np.arange(9, dtype=np.int32), loss_mask=np.arange(9) > 3, logprobs=np.full(9, -1.0, np.float32),
            ce_weights=(np.arange(9) == 2).astype(np.float32),
        )
    ]  # fmt: skip
    batch = pack_samples(samples, seq_len=16).micro_batches
    tokens = to_tokens(batch[0], torch.zeros(6, device="meta", requires_grad=True))
    loss = objective_loss(
        Objective(loss=partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=0.0)),
        tokens,
        count_of(batch),
    )
    assert {"rl", "ce"} < loss.metrics.keys()
    loss.total.backward()


def test_record_holds_every_loss_token_with_its_environment() -> None:
    packing = packed(seq_len=64)
    tokens = learner().step(packing.micro_batches).tokens
    assert len(tokens.logprobs) == packing.loss_tokens
    assert set(tokens.env_index.tolist()) == {0, 1}
    assert (tokens.entropies > 0).all()


def test_memory_that_runs_out_in_the_optimizers_step_is_not_called_a_step_that_changed_nothing() -> None:
    trained, packing = learner(type="muon"), packed(seq_len=64)
    trained.step(packing.micro_batches)
    before = gather_state(trained.model)

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trained.run.optimizer.parts[1].register_step_pre_hook(no_memory)  # the first part has stepped by then
    with pytest.raises(UpdateError, match=r"step 2: the optimizer failed in the midst .*Tried to allocate 2.00 GiB"):
        trained.step(packing.micro_batches)
    changed = {name for name, tensor in gather_state(trained.model).items() if not torch.equal(tensor, before[name])}
    assert 0 < len(changed) < len(before)
    assert trained.run.step_done == 1


@pytest.mark.parametrize("normaliser", [Normaliser.TOKEN, Normaliser.SEQUENCE])
def test_two_halves_of_a_batch_are_its_step_bit_for_bit_where_both_have_its_counts(normaliser: Normaliser) -> None:
    """Gradient, weights, moments and tokens. The loss is summed in another order, so it is equal but for rounding."""
    whole, halves = (learner(lambda inputs: aipo_loss(inputs, delta=2.0), normaliser) for _ in range(2))
    rows = packed(seq_len=12, count=9).micro_batches
    counts = count_of(rows)
    for _ in range(2):
        wanted = whole.step(rows)
        for half in (rows[:3], rows[3:]):
            halves.pass_rows(half, counts)
        result = halves.learner.optim_step(halves.run)
        assert (result.step, result.grad_norm, result.lr) == (wanted.step, wanted.grad_norm, wanted.lr)
        for name in TokenRecord.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(result.tokens, name), getattr(wanted.tokens, name))
        assert result.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert result.metrics == pytest.approx(dict(wanted.metrics), rel=1e-6)
    assert moments(halves) == moments(whole)
    after = gather_state(whole.model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in gather_state(halves.model).items())


def test_passes_without_common_counts_add_up_their_own_means() -> None:
    """So two passes over equal halves have the gradient of the sum, twice that of the mean over both."""
    rows = packed(seq_len=64, count=4).micro_batches
    once, twice = learner(max_norm=None), learner(max_norm=None)
    single = once.step(rows)
    for _ in range(2):
        twice.pass_rows(rows)
    double = twice.learner.optim_step(twice.run)
    assert double.grad_norm == pytest.approx(2 * single.grad_norm, rel=1e-6)
    assert double.loss == pytest.approx(2 * single.loss, rel=1e-6)
    assert len(double.tokens.logprobs) == 2 * len(single.tokens.logprobs)


def test_a_run_without_a_gradient_refuses_an_optimizers_step() -> None:
    trained, rows = learner(), packed(seq_len=64).micro_batches
    before = gather_state(trained.model)
    refusal = r"step {}: run 'main' has no gradient to step with; call pass_rows before each optim_step"
    with pytest.raises(StepError, match=refusal.format(1)):
        trained.learner.optim_step(trained.run)
    assert trained.run.step_done == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in gather_state(trained.model).items())
    trained.step(rows)
    with pytest.raises(StepError, match=refusal.format(2)):  # the step has used it up
        trained.learner.optim_step(trained.run)


def test_a_pass_that_fails_drops_the_gradient_of_the_pass_before_it() -> None:
    trained, plain, rows = learner(), learner(), packed(seq_len=64).micro_batches
    trained.step(rows)
    plain.step(rows)
    before, optimizer = gather_state(trained.model), moments(trained)
    trained.pass_rows(rows)
    assert any(parameter.grad is not None for parameter in trained.model.parameters())
    sound, trained.run.objective = trained.run.objective, Objective(loss=not_finite_loss)
    with pytest.raises(StepError, match=r"step 2: loss nan is not finite"):
        trained.pass_rows(rows)
    assert all(parameter.grad is None for parameter in trained.model.parameters())
    with pytest.raises(StepError, match="no gradient to step with"):
        trained.learner.optim_step(trained.run)
    assert (trained.run.step_done, moments(trained)) == (1, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gather_state(trained.model).items())

    trained.run.objective = sound
    assert trained.step(rows).loss == plain.step(rows).loss, "the next step is as if the failed one had not been"
    after = gather_state(plain.model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in gather_state(trained.model).items())


def test_gradient_that_is_not_finite_changes_nothing() -> None:
    trained, rows = learner(), packed(seq_len=64).micro_batches
    before = gather_state(trained.model)
    trained.pass_rows(rows)
    gradient = trained.run.parameters[0].grad
    assert gradient is not None
    gradient[0] = float("inf")
    with pytest.raises(StepError, match=r"step 1: gradient norm inf is not finite"):
        trained.learner.optim_step(trained.run)
    assert all(parameter.grad is None for parameter in trained.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in gather_state(trained.model).items())


def test_zero_gradient_ratio_counts_unused_vocabulary() -> None:
    mask = np.array([False, True, True])
    sample = TrainSample(token_ids=np.array([1, 2, 3], np.int32), loss_mask=mask, logprobs=np.zeros(3, np.float32))
    packing = pack_samples([sample], seq_len=8)
    nothing = learner(
        lambda inputs: aipo_loss(
            replace(inputs, inference_logprobs=inputs.logprobs.detach(), advantages=inputs.advantages * 0), delta=1.0
        )
    )
    assert nothing.step(packing.micro_batches).zero_grad_ratio == 1.0
    assert learner().step(packing.micro_batches).zero_grad_ratio < 0.5


def test_evaluation_changes_nothing_and_matches_the_step() -> None:
    trained, packing = learner(), packed(seq_len=64)
    before = gather_state(trained.model)
    seen = trained.evaluate(packing.micro_batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gather_state(trained.model).items())
    result = trained.step(packing.micro_batches)
    np.testing.assert_allclose(result.tokens.logprobs, seen.logprobs, atol=1e-6)


def test_warming_up_leaves_everything_as_it_was() -> None:
    plain, warmed, packing = learner(), learner(), packed(seq_len=64)
    state = torch.random.get_rng_state()
    warmed.learner.warm_up(packed(seq_len=20, count=3).micro_batches)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert warmed.run.step_done == 0
    for _ in range(2):
        assert warmed.step(packing.micro_batches).loss == plain.step(packing.micro_batches).loss
    for name, tensor in gather_state(plain.model).items():
        assert torch.equal(gather_state(warmed.model)[name], tensor)


def test_flops_count_parameters_and_attention_within_samples() -> None:
    model, packing = tiny_qwen3(vocab_size=VOCAB), packed(seq_len=64)
    lengths = np.concatenate([np.diff(row.sample_offsets) for row in packing.micro_batches])
    expected = 6 * active_parameters(model) * lengths.sum() + 6 * 1 * 2 * 8 * (lengths**2).sum()
    assert step_flops(model, packing.micro_batches) == pytest.approx(float(expected))
    assert active_parameters(model) == sum(parameter.numel() for parameter in model.parameters())
    assert peak_flops(torch.device("cpu")) > 1e8


def mixture_learner() -> Trained:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=VOCAB, num_experts=8, num_experts_per_tok=2, **sizes, **heads)
    policy = PackedPolicy(Qwen3MoeForCausalLM(config))
    return Trained.by(Learner(policy), Objective(loss=cross_entropy_loss), OptimConfig(lr=1e-2))


def test_a_mixture_of_experts_says_how_its_routers_spread_the_tokens() -> None:
    trained = mixture_learner()
    packing = packed(seq_len=25)
    routers = [module for name, module in trained.model.named_modules() if name.endswith("mlp.gate")]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for router in routers:
        router.register_forward_hook(lambda module, given, output: seen.append((output[0].detach(), output[2])))
    with_own = trained.step(packing.micro_batches).routing
    vios, confidences = [], []
    for layer in range(2):
        mine = seen[layer::2]  # rows one after the other, each through both layers
        loads = torch.cat([chosen.flatten() for _, chosen in mine]).bincount(minlength=8).double()
        vios.append(float(loads.max() / loads.mean() - 1))
        confidences.append(float(torch.cat([lg.softmax(-1).gather(-1, chosen).sum(-1) for lg, chosen in mine]).mean()))
    assert len(seen) == 2 * len(packing.micro_batches) > 2
    assert with_own == pytest.approx(
        {"max_vio/mean": np.mean(vios), "routing_confidence/mean": np.mean(confidences)}, rel=1e-5
    )
    assert 0.0 < with_own["max_vio/mean"] <= 8 / 2 - 1


def test_the_routing_of_a_step_counts_all_its_passes() -> None:
    whole, halves = mixture_learner(), mixture_learner()
    rows = packed(seq_len=12).micro_batches
    wanted = whole.step(rows).routing
    for half in (rows[:2], rows[2:]):
        halves.pass_rows(half, count_of(rows))
        halves.evaluate(rows)  # which is none of the step's passes
    assert halves.learner.optim_step(halves.run).routing == pytest.approx(wanted, rel=1e-12)


def test_a_model_without_experts_says_nothing_of_routing() -> None:
    assert learner().step(packed(seq_len=25).micro_batches).routing == {}
