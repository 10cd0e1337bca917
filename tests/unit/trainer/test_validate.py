from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.trainer.service import check_batch
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Batch, MicroBatch


def row() -> MicroBatch:
    samples = [
        TrainSample(
            token_ids=np.arange(4, dtype=np.int32),
            loss_mask=np.array([False, False, True, True]),
            logprobs=np.full(4, -1.0, np.float32),
        )
        for _ in range(2)
    ]
    return pack_samples(samples, seq_len=16).micro_batches[0]


def batch(*rows: MicroBatch) -> Batch:
    return Batch(run_id="main", step=1, micro_batches=rows, loss_tokens=4, environments=("env",))


def test_all_violations_come_in_one_answer() -> None:
    bad = replace(row(), temperatures=np.zeros(2, np.float32), position_ids=np.zeros(8, np.int32))
    with pytest.raises(MeshError) as caught:
        check_batch(batch(replace(row(), token_ids=np.zeros(8, np.int32)), bad), vocab_size=3)
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {f"micro_batches[1].{name}" for name in ("temperatures", "position_ids", "token_ids")}


def test_reference_logprobs_are_held_to_the_same_where_they_count() -> None:
    weights = np.array([0, 0, 1, 1, 0, 0, 1, 0], np.float32)
    reference = np.array([9, 9, -1, -1, 9, 9, -1, 9], np.float32)
    check_batch(batch(replace(row(), ref_kl_weights=weights, ref_logprobs=reference)), vocab_size=4)
    with pytest.raises(MeshError, match=r"ref_logprobs: must be logprobs"):
        check_batch(batch(replace(row(), ref_kl_weights=weights, ref_logprobs=-reference)), vocab_size=4)


@pytest.mark.parametrize(
    ("ids", "logprob", "problem"),
    [
        ([3, 2], -1.0, None),
        ([3, 4], -1.0, r"ref_top_ids: must be below the vocabulary's 4 tokens"),
        ([2, 2], -1.0, r"ref_top_ids: must hold each candidate of a token once"),
        ([3, 2], 1.0, r"ref_top_logprobs: must be logprobs"),
        ([-1, -1], 1.0, None),
    ],
)
def test_candidates_are_tokens_of_the_model_each_once(ids: list[int], logprob: float, problem: str | None) -> None:
    weights = np.array([0, 0, 1, 1, 0, 0, 1, 0], np.float32)
    taught = replace(
        row(),
        ref_kl_weights=weights,
        ref_logprobs=-weights,
        ref_top_ids=np.array([ids] * 8, np.int32),
        ref_top_logprobs=np.full((8, 2), logprob, np.float32),
    )
    with nullcontext() if problem is None else pytest.raises(MeshError, match=problem):
        check_batch(batch(taught), vocab_size=4)
