"""A batch goes up as messages, is checked one message at a time, and comes out whole or not at all."""

import dataclasses

import numpy as np
import pytest

from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, MicroBatch


def make_micro_batch(**changes):
    micro_batch = MicroBatch(
        dp_rank=0,
        token_ids=np.arange(5, dtype=np.int32),
        position_ids=np.array([0, 1, 2, 0, 1], dtype=np.int32),
        loss_mask=np.array([False, True, True, False, True]),
        advantages=np.ones(5, dtype=np.float32),
        inference_logprobs=-np.ones(5, dtype=np.float32),
        sample_offsets=np.array([0, 3, 5], dtype=np.int64),
        temperatures=np.ones(2, dtype=np.float32),
        env_index=np.zeros(2, dtype=np.int32),
        rollout_ids=("a", "b"),
        traceparents=("t",),
    )
    return dataclasses.replace(micro_batch, **changes)


def make_batch(*micro_batches, **changes):
    micro_batches = micro_batches or (make_micro_batch(),)
    loss_tokens = sum(int(micro_batch.loss_mask.sum()) for micro_batch in micro_batches)
    batch = Batch(run_id="r", step=2, micro_batches=micro_batches, loss_tokens=loss_tokens, environments=("e",))
    return dataclasses.replace(batch, **changes)


def upload(messages, **limits):
    reader = convert.BatchReader(**{"seq_len": 16, **limits})
    for message in messages:
        reader.feed(pb.SubmitBatchRequest.FromString(message.SerializeToString()))
    return reader.finish()


def refusal(messages, **limits):
    with pytest.raises(MeshError) as refused:
        upload(messages, **limits)
    return refused.value


def test_the_digest_does_not_depend_on_memory_layout():
    padded = np.zeros((5, 2), dtype=np.int32)
    padded[:, 0] = np.arange(5)
    strided = make_batch(make_micro_batch(token_ids=padded[:, 0]))
    assert convert.batch_digest(strided) == convert.batch_digest(make_batch())


def test_tensors_that_changed_on_the_way_are_told_apart():
    messages = list(convert.batch_to_messages(make_batch()))
    messages[1].micro_batch.advantages.data = np.full(5, 2.0, dtype=np.float32).tobytes()
    error = refusal(messages)
    assert error.reason is Reason.BATCH_DIGEST_MISMATCH
    assert error.retryable


def test_a_micro_batch_of_the_wrong_type_is_not_sent():
    with pytest.raises(ValueError, match=r"MicroBatch\.token_ids must be int32, got int64"):
        list(convert.batch_to_messages(make_batch(make_micro_batch(token_ids=np.arange(5)))))


def test_micro_batches_need_one_header_first():
    messages = list(convert.batch_to_messages(make_batch()))
    assert [v.field for v in refusal(messages[1:]).violations] == ["header"]
    assert [v.field for v in refusal([]).violations] == ["header"]
    assert [v.field for v in refusal([messages[0], messages[0]]).violations] == ["header"]


def test_missing_and_surplus_micro_batches_are_counted():
    messages = list(convert.batch_to_messages(make_batch(make_micro_batch(), make_micro_batch())))
    missing = refusal(messages[:-1])
    assert [(v.field, v.description) for v in missing.violations] == [
        ("num_micro_batches", "is 2, 1 came"),
        ("loss_tokens", "is 6, 3 came"),
    ]
    surplus = refusal([*messages, messages[-1]])
    assert [v.description for v in surplus.violations] == [
        "was not expected: 2 micro-batches follow the header, 2 came"
    ]


WEIGHTED = {
    "rl_weights": np.array([0, 2, 1, 0, 1], dtype=np.float32),
    "ce_weights": np.array([0, 0, 0.5, 0, 0], dtype=np.float32),
    "ref_kl_weights": np.array([0, 1, 0, 0, 1], dtype=np.float32),
    "ref_logprobs": np.array([0, -1, 0, 0, -2], dtype=np.float32),
}


def test_the_digest_tells_which_weights_are_set_and_what_they_are():
    zeros = np.zeros(5, dtype=np.float32)
    rows = [{}, *({name: zeros} for name in WEIGHTED), WEIGHTED, WEIGHTED | {"ce_weights": zeros}]
    assert len({convert.batch_digest(make_batch(make_micro_batch(**row))) for row in rows}) == len(rows)


def test_a_batch_may_have_no_sampled_token_when_another_term_has_one():
    unsampled = {"loss_mask": np.zeros(5, dtype=np.bool_)}
    arrived = upload(convert.batch_to_messages(make_batch(make_micro_batch(**unsampled, **WEIGHTED))))
    assert arrived.loss_tokens == 0
    for weights in ({}, {"ce_weights": np.zeros(5, np.float32)}, {"rl_weights": np.ones(5, np.float32)}):
        error = refusal(convert.batch_to_messages(make_batch(make_micro_batch(**unsampled, **weights))))
        assert [v.field for v in error.violations] == ["loss_mask"]


def test_ranks_take_equal_shares():
    both_on_one = convert.batch_to_messages(make_batch(make_micro_batch(), make_micro_batch()))
    assert [v.field for v in refusal(both_on_one, dp_size=2).violations] == ["dp_rank"]
    shared = convert.batch_to_messages(make_batch(make_micro_batch(), make_micro_batch(dp_rank=1)))
    assert len(upload(shared, dp_size=2).micro_batches) == 2


def test_too_many_tokens_and_unknown_ranks_are_refused_at_once():
    error = refusal(convert.batch_to_messages(make_batch(make_micro_batch(dp_rank=3))), seq_len=4)
    assert [(v.field, v.description) for v in error.violations] == [
        ("micro_batches[0].token_ids", "takes at most 4, got 5"),
        ("micro_batches[0].dp_rank", "must be below 1"),
    ]


def test_every_wrong_tensor_of_a_micro_batch_is_named():
    broken = make_micro_batch(
        position_ids=np.zeros(4, dtype=np.int32),
        advantages=np.full(5, np.nan, dtype=np.float32),
        sample_offsets=np.array([0, 3, 3, 5], dtype=np.int64),
        env_index=np.array([0, 1, 0], dtype=np.int32),
    )
    error = refusal(convert.batch_to_messages(make_batch(broken)))
    assert [v.field.removeprefix("micro_batches[0].") for v in error.violations] == [
        "position_ids",
        "sample_offsets",
        "temperatures",
        "rollout_ids",
        "advantages",
        "env_index",
    ]


def test_wrong_element_types_are_named_together():
    message = convert.micro_batch_to_proto(make_micro_batch(**WEIGHTED))
    message.token_ids.CopyFrom(message.sample_offsets)
    message.loss_mask.Clear()
    message.ce_weights.CopyFrom(message.sample_offsets)
    with pytest.raises(MeshError) as refused:
        convert.micro_batch_from_proto(message)
    assert [v.field.removeprefix("micro_batch.") for v in refused.value.violations] == [
        "token_ids.dtype", "loss_mask.dtype", "ce_weights.dtype",
    ]  # fmt: skip


def test_a_bad_header_names_every_field():
    error = refusal([pb.SubmitBatchRequest(header=pb.BatchHeader())], dp_size=2)
    assert [v.field for v in error.violations] == [
        "header.step",
        "header.digest",
        "header.num_micro_batches",
        "header.environments",
    ]


PREFIXED = {
    "prefix_tokens": np.array([0, 2], dtype=np.int32),
    "prefix_samples": np.array([0, 0], dtype=np.int32),
}


def test_shared_prefixes_arrive_as_they_were_sent_and_count_in_the_digest():
    row = make_micro_batch(**PREFIXED)
    (arrived,) = upload(convert.batch_to_messages(make_batch(row))).micro_batches
    for name, sent in PREFIXED.items():
        np.testing.assert_array_equal(getattr(arrived, name), sent)
    assert arrived.shared_tokens == 2
    other = make_micro_batch(**PREFIXED | {"prefix_tokens": np.array([0, 1], dtype=np.int32)})
    assert len({convert.batch_digest(make_batch(one)) for one in (row, other, make_micro_batch())}) == 3


CANDIDATES = WEIGHTED | {
    "ref_top_ids": np.array([[-1, -1], [7, 3], [-1, -1], [-1, -1], [3, -1]], dtype=np.int32),
    "ref_top_logprobs": np.array([[0, 0], [-0.5, -1.5], [0, 0], [0, 0], [-2, 0]], dtype=np.float32),
}
REFERENCE_TOGETHER = "must be set: ref_kl_weights and ref_logprobs come together or not at all"
CANDIDATES_TOGETHER = "must be set: candidates are those of ref_kl tokens, each with its logprob"
PREFIXES_TOGETHER = "must be set: prefix_tokens and prefix_samples come together or not at all"


def prefixes(tokens, samples):
    return {
        "prefix_tokens": np.array(tokens, dtype=np.int32),
        "prefix_samples": None if samples is None else np.array(samples, dtype=np.int32),
    }


@pytest.mark.parametrize(
    ("fields", "name", "description"),
    [
        (
            WEIGHTED | {"ce_weights": np.zeros(4, np.float32)},
            "ce_weights",
            "must have 5 elements like token_ids, got 4",
        ),
        (WEIGHTED | {"rl_weights": np.full(5, np.inf, np.float32)}, "rl_weights", "must be finite"),
        (WEIGHTED | {"ref_logprobs": np.full(5, np.nan, np.float32)}, "ref_logprobs", "must be finite"),
        (
            WEIGHTED | {"ce_weights": np.ones(5, np.float32)},
            "ce_weights",
            "must be 0 at the first token of a sample, which nothing predicts",
        ),
        (WEIGHTED | {"ref_logprobs": None}, "ref_logprobs", REFERENCE_TOGETHER),
        (WEIGHTED | {"ref_kl_weights": None}, "ref_kl_weights", REFERENCE_TOGETHER),
        (CANDIDATES | {"ref_top_ids": None}, "ref_top_ids", CANDIDATES_TOGETHER),
        (CANDIDATES | {"ref_kl_weights": None, "ref_logprobs": None}, "ref_kl_weights", CANDIDATES_TOGETHER),
        (
            CANDIDATES | {"ref_top_logprobs": np.zeros((5, 3), np.float32)},
            "ref_top_logprobs",
            "must have a column for each of ref_top_ids, got (5, 3)",
        ),
        (
            CANDIDATES | {"ref_top_ids": np.full((5, 2), -2, np.int32)},
            "ref_top_ids",
            "must be token ids, or -1 for none",
        ),
        (CANDIDATES | {"ref_top_logprobs": np.full((5, 2), np.nan, np.float32)}, "ref_top_logprobs", "must be finite"),
        (
            CANDIDATES | {"ref_top_ids": np.zeros((4, 2), np.int32)},
            "ref_top_ids",
            "must have 5 elements like token_ids, got 4",
        ),
        (prefixes([0], [0, 0]), "prefix_tokens", "must have 2 elements like samples, got 1"),
        (prefixes([0, -1], [0, 0]), "prefix_tokens", "must not be negative"),
        (prefixes([0, 2], [0, 2]), "prefix_samples", "must point to one of the row's 2 samples"),
        (prefixes([0, 2], [0, 1]), "prefix_samples", "must point to a sample that has no prefix of its own"),
        (prefixes([1, 2], [1, 0]), "prefix_samples", "must point to a sample that has no prefix of its own"),
        (prefixes([0, 9], [0, 0]), "prefix_tokens", "must not be more tokens than the other sample has"),
        (prefixes([0, 2], None), "prefix_samples", PREFIXES_TOGETHER),
    ],
)
def test_weights_candidates_and_prefixes_that_make_no_sense_are_named(fields, name, description):
    error = refusal(convert.batch_to_messages(make_batch(make_micro_batch(**fields))))
    assert error.reason is Reason.INVALID_REQUEST
    assert [(v.field, v.description) for v in error.violations] == [(f"micro_batches[0].{name}", description)]
