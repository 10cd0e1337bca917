"""What may not change the gradient: packing, padding, the micro-batch split, and the other terms."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.algorithms import losses
from meshrl.algorithms.objective import BatchCounts, Normaliser, Objective, RowTokens, count, objective_loss
from meshrl.algorithms.packing import TrainSample, pack_samples

CLIP = {"clip_low": 0.1, "clip_high": 0.2}
DPPO = {"mask_low": 0.05, "mask_high": 0.05, "adv_tau": 1.0}
OBJECTIVES = [
    Objective(loss=functools.partial(losses.dppo_kl_loss, **DPPO, kl_tau=1e-3)),
    Objective(loss=functools.partial(losses.dppo_kl_loss, **DPPO, kl_tau=0.0)),
    Objective(loss=functools.partial(losses.aipo_loss, delta=1.1)),
    Objective(loss=functools.partial(losses.grpo_loss, **CLIP)),
    Objective(loss=functools.partial(losses.grpo_loss, **CLIP), normaliser=Normaliser.SEQUENCE),
    Objective(loss=functools.partial(losses.grpo_loss, **CLIP), normaliser=Normaliser.FIXED, fixed_length=7),
    Objective(loss=functools.partial(losses.gspo_loss, **CLIP), normaliser=Normaliser.SEQUENCE),
    Objective(loss=functools.partial(losses.cispo_loss, clip_high=0.2)),
    Objective(loss=losses.load_custom_loss("custom_functions.importance_weighted", {})),
]
FIELDS = ("logp", "logq", "adv", "sampled", "rl_weights", "ce_weights", "ref_kl_weights", "ref")
TERMS = ("rl", "ce", "ref_kl")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The predicted tokens of one sequence, a column a field."""

    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["logp"])

    def with_columns(self, **columns: np.ndarray) -> "Tokens":
        return Tokens({**self.columns, **columns})


@dataclass(frozen=True, eq=False)
class Outcome:
    total: float
    gradients: list[np.ndarray]  # a sequence, in the batch's order
    metrics: dict[str, float]


def draw_sequence(rng: np.random.Generator) -> Tokens:
    length = int(rng.integers(1, 7))
    logp = -rng.exponential(1.0, length)
    sampled = rng.random(length) < rng.choice([0.0, 0.8, 1.0])
    return Tokens(
        {
            "logp": logp,
            "logq": np.where(sampled, logp - rng.normal(rng.choice([-0.3, 0.0, 0.3]), 0.1, length), 0.0),
            "adv": np.where(sampled, rng.choice([-1.0, 0.0, 0.5, 2.0]), 0.0),
            "sampled": sampled,
            "rl_weights": rng.choice([0.0, 0.5, 1.0], length),
            "ce_weights": rng.choice([0.0, 0.0, 1.0, 2.0], length),
            "ref_kl_weights": rng.choice([0.0, 0.0, 0.3, 1.0], length),
            "ref": logp + rng.normal(0.0, 0.5, length),
        }
    )


def counts_of(batch: Sequence[Tokens]) -> BatchCounts:
    return BatchCounts(
        rl_tokens=sum(int(tokens.columns["sampled"].sum()) for tokens in batch),
        rl_sequences=sum(bool(tokens.columns["sampled"].any()) for tokens in batch),
        ce_tokens=sum(int(np.count_nonzero(tokens.columns["ce_weights"])) for tokens in batch),
        ref_kl_tokens=sum(int(np.count_nonzero(tokens.columns["ref_kl_weights"])) for tokens in batch),
    )


def row_of(sequences: Sequence[Tokens]) -> RowTokens:
    empty = np.zeros(0)
    columns = {
        name: torch.from_numpy(np.concatenate([empty, *(tokens.columns[name] for tokens in sequences)]))
        for name in FIELDS
    }
    return RowTokens(
        logprobs=columns["logp"].requires_grad_(),
        inference_logprobs=columns["logq"],
        advantages=columns["adv"],
        rl_mask=columns["sampled"].bool(),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])),
        num_sequences=len(sequences),
        rl_weights=columns["rl_weights"],
        ce_weights=columns["ce_weights"],
        ref_kl_weights=columns["ref_kl_weights"],
        ref_logprobs=columns["ref"],
    )


def outcome(
    objective: Objective, batch: Sequence[Tokens], rows: Sequence[Sequence[int]], counts: BatchCounts | None = None
) -> Outcome:
    """The batch's objective when packed into `rows` of sequence indexes."""
    total = 0.0
    gradients = [np.zeros(len(tokens)) for tokens in batch]
    metrics: dict[str, float] = {}
    for indexes in rows:
        row = row_of([batch[index] for index in indexes])
        loss = objective_loss(objective, row, counts or counts_of(batch))
        total += loss.total.item()
        (gradient,) = torch.autograd.grad(loss.total, row.logprobs)
        cuts = np.cumsum([len(batch[index]) for index in indexes])[:-1]
        for index, part in zip(indexes, np.split(gradient.numpy(), cuts), strict=bool(indexes)):
            gradients[index] = part
        for name, value in loss.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
    return Outcome(total, gradients, metrics)


def assert_same(one: Outcome, other: Outcome) -> None:
    assert other.total == pytest.approx(one.total, rel=1e-10, abs=1e-12)
    for mine, theirs in zip(one.gradients, other.gradients, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-9, atol=1e-13)
    assert set(one.metrics) == set(other.metrics)
    for name, value in one.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def one_row(batch: Sequence[Tokens]) -> list[list[int]]:
    return [list(range(len(batch)))]


def only(term: str, tokens: Tokens) -> Tokens:
    """The sequence with the tokens of one term; where nothing else was sampled, r of ref_kl stays what it was."""
    nothing = np.zeros(len(tokens))
    weights = {f"{other}_weights": nothing for other in TERMS if other != term}
    return tokens.with_columns(**weights)


seeds = st.integers(0, 2**32 - 1)
objectives = st.sampled_from(OBJECTIVES)
quick = settings(max_examples=40, deadline=None)


@quick
@given(objectives, seeds)
def test_order_rows_and_padding_do_not_change_objective_gradient_or_metrics(objective: Objective, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = [draw_sequence(rng) for _ in range(int(rng.integers(1, 7)))]
    packed = outcome(objective, batch, one_row(batch))

    order = rng.permutation(len(batch)).tolist()
    cuts = np.sort(rng.integers(0, len(batch) + 1, size=3))  # rows of micro-batches or of ranks; some are empty
    rows = [part.tolist() for part in np.split(np.array(order, dtype=np.int64), cuts)]
    assert_same(packed, outcome(objective, batch, rows))

    pad = Tokens({name: np.zeros(3) for name in FIELDS} | {"logp": np.array([-1.0, -9.0, -80.0])})
    where = int(rng.integers(0, len(batch) + 1))
    padded = [*batch[:where], pad, *batch[where:]]
    with_pad = outcome(objective, padded, one_row(padded), counts_of(batch))
    assert counts_of(padded) == counts_of(batch)
    assert with_pad.gradients.pop(where).tolist() == [0.0] * 3
    assert_same(packed, with_pad)


@quick
@given(st.sampled_from(OBJECTIVES[1:]), seeds)  # the first has a KL term, which needs no advantage
def test_tokens_without_advantage_contribute_nothing(objective: Objective, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = [only("rl", draw_sequence(rng)) for _ in range(4)]
    silent = batch[0].with_columns(adv=np.zeros(len(batch[0])))
    batch[0] = silent
    both = outcome(objective, batch, one_row(batch))
    assert not both.gradients[0].any()
    alone = outcome(objective, batch[1:], one_row(batch[1:]), counts_of(batch))
    assert both.total == pytest.approx(alone.total, rel=1e-10, abs=1e-12)
    for mine, theirs in zip(both.gradients[1:], alone.gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-13)


@quick
@given(objectives, seeds)
def test_the_objective_is_the_sum_of_its_terms_and_no_weight_rescales_another_term(
    objective: Objective, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    batch = [draw_sequence(rng) for _ in range(4)]
    rows = one_row(batch)
    whole = outcome(objective, batch, rows)
    alone = {}
    for term in TERMS:
        # The rl counts stay: a token is of the rl term where it was sampled, whatever its weight.
        parts = [only(term, tokens) for tokens in batch]
        alone[term] = outcome(objective, parts, rows)
    assert whole.total == pytest.approx(sum(part.total for part in alone.values()), rel=1e-9, abs=1e-12)
    for index, gradient in enumerate(whole.gradients):
        expected = sum(part.gradients[index] for part in alone.values())
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)
    for term in TERMS:
        scaled = [
            tokens.with_columns(**{f"{term}_weights": 3.0 * tokens.columns[f"{term}_weights"]}) for tokens in batch
        ]
        heavier = outcome(objective, scaled, rows)
        for index, gradient in enumerate(heavier.gradients):
            expected = whole.gradients[index] + 2.0 * alone[term].gradients[index]
            np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)


@quick
@given(objectives, seeds, st.sampled_from(["ce", "ref_kl"]))
def test_more_tokens_of_one_term_do_not_rescale_another(objective: Objective, seed: int, term: str) -> None:
    rng = np.random.default_rng(seed)
    batch = [draw_sequence(rng) for _ in range(3)]
    more = draw_sequence(rng)
    nothing = np.zeros(len(more))
    more = only(term, more.with_columns(sampled=nothing.astype(bool), **{f"{term}_weights": nothing + 1.0}))
    before = outcome(objective, batch, one_row(batch))
    after = outcome(objective, [*batch, more], [*one_row(batch), [len(batch)]])
    for other in TERMS:
        if other != term:
            expected = before.metrics.get(other, 0.0)
            assert after.metrics.get(other, 0.0) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(8, 40))
def test_counts_of_a_batch_do_not_depend_on_its_packing(seed: int, dp_size: int, seq_len: int) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(int(rng.integers(1, 8))):
        length = int(rng.integers(2, 8))
        mask = rng.random(length) < 0.5
        mask[0], mask[1] = False, True
        samples.append(
            TrainSample(
                token_ids=np.arange(length, dtype=np.int32),
                loss_mask=mask,
                logprobs=np.zeros(length, dtype=np.float32),
                advantage=float(index),
            )
        )
    counts = count(pack_samples(samples, seq_len=seq_len, dp_size=dp_size).micro_batches)
    assert counts == BatchCounts(
        rl_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        rl_sequences=len(samples),
        ce_tokens=0,
        ref_kl_tokens=0,
    )


def test_counts_take_each_term_from_its_own_weights() -> None:
    mask = np.array([False, True, True])
    sample = TrainSample(token_ids=np.arange(3, dtype=np.int32), loss_mask=mask, logprobs=np.zeros(3, dtype=np.float32))
    (row,) = pack_samples([sample, sample], seq_len=8).micro_batches
    ce_weights = np.array([0, 0, 0, 0, 0.5, 0], dtype=np.float32)
    ref_kl_weights = np.array([0, 1, 1, 0, -1, 0], dtype=np.float32)
    weighted = replace(row, ce_weights=ce_weights, ref_kl_weights=ref_kl_weights)
    without_rl = replace(row, loss_mask=np.zeros(6, dtype=np.bool_))
    assert count([weighted, without_rl]) == BatchCounts(rl_tokens=4, rl_sequences=2, ce_tokens=1, ref_kl_tokens=3)
