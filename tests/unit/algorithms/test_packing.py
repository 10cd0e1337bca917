import numpy as np
import pytest

from meshrl.algorithms.packing import TrainSample, pack_samples


def sample(length: int, *, loss_from: int = 1, rollout_id: str = "r", **fields: object) -> TrainSample:
    mask = np.arange(length) >= loss_from
    ids = np.arange(length, dtype=np.int32)
    logprobs = -np.arange(length, dtype=np.float32)
    return TrainSample(token_ids=ids, loss_mask=mask, logprobs=logprobs, rollout_id=rollout_id, **fields)  # type: ignore[arg-type] # test data by keyword


def test_samples_share_a_row_up_to_seq_len() -> None:
    packing = pack_samples([sample(6), sample(4), sample(3)], seq_len=10)
    assert [len(row.token_ids) for row in packing.micro_batches] == [10, 3]
    assert packing.micro_batches[0].sample_offsets.tolist() == [0, 6, 10]
    assert packing.micro_batches[0].position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert packing.loss_tokens == 5 + 3 + 2


def test_long_sample_is_truncated_at_its_tail() -> None:
    packing = pack_samples([sample(9, loss_from=3)], seq_len=5)
    assert packing.micro_batches[0].token_ids.tolist() == [0, 1, 2, 3, 4]
    assert (packing.truncated_samples, packing.loss_tokens) == (1, 2)


def test_sample_without_loss_token_is_left_out() -> None:
    packing = pack_samples([sample(4), sample(4, loss_from=4), sample(9, loss_from=6)], seq_len=5)
    assert packing.dropped_samples == 2
    assert [len(row.rollout_ids) for row in packing.micro_batches] == [1]


def test_distinct_traceparents_of_rollouts_travel_with_the_row() -> None:
    rows = pack_samples([sample(3, traceparent="a"), sample(3, traceparent="a"), sample(3)], seq_len=99).micro_batches
    assert rows[0].traceparents == ("a",)


def weights(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_weights_travel_with_their_sample_and_others_get_what_changes_nothing() -> None:
    weighted = sample(
        4,
        rollout_id="w",
        rl_weights=weights(9, 2, 3, 4),
        ce_weights=weights(9, 0, 1, 0),
        ref_kl_weights=weights(9, 1, 0, 0),
        ref_logprobs=weights(-9, -1, -2, -3),
    )
    (row,) = pack_samples([weighted, sample(3)], seq_len=8).micro_batches
    assert row.rl_weights.tolist() == [9, 2, 3, 4, 1, 1, 1]
    assert row.ce_weights.tolist() == [0, 0, 1, 0, 0, 0, 0]  # nothing predicts the first token
    assert row.ref_kl_weights.tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert row.ref_logprobs.tolist() == [-9, -1, -2, -3, 0, 0, 0]
    assert {row.rl_weights.dtype, row.ce_weights.dtype, row.ref_logprobs.dtype} == {np.dtype(np.float32)}


def test_rows_without_weights_have_none() -> None:
    weighted = sample(4, ce_weights=weights(0, 0, 1, 0))
    plain, other = pack_samples([weighted, sample(6)], seq_len=8).micro_batches
    assert [plain.ce_weights, plain.rl_weights, plain.ref_kl_weights, plain.ref_logprobs] == [None] * 4
    assert other.ce_weights is not None


def test_a_sample_with_tokens_of_another_term_only_is_kept() -> None:
    observed = sample(4, loss_from=4, rollout_id="o", ce_weights=weights(0, 1, 0, 0))
    nothing = sample(4, loss_from=4, rl_weights=weights(1, 1, 1, 1), ce_weights=weights(1, 0, 0, 0))
    packing = pack_samples([observed, nothing], seq_len=8)
    assert [row.rollout_ids for row in packing.micro_batches] == [("o",)]
    assert (packing.loss_tokens, packing.dropped_samples) == (0, 1)


def test_fillers_have_no_weights() -> None:
    filler = pack_samples([sample(3, ce_weights=weights(0, 1, 1))], seq_len=8, dp_size=2).micro_batches[1]
    assert filler.ce_weights is None
    assert not filler.loss_mask.any()


UNEVEN = TrainSample(token_ids=np.zeros(3, np.int32), loss_mask=np.ones(2, np.bool_), logprobs=np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (sample(3, ce_weights=weights(0, 1)), "3 token ids and 2 ce_weights"),
        (UNEVEN, "3 token ids, 2 mask values"),
        (sample(3, loss_from=3), "none of the 1 samples"),
    ],
)
def test_what_cannot_be_trained_is_refused(given: TrainSample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_samples([given], seq_len=8)
