import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.algorithms.packing import TrainSample, pack_samples

SEQ_LEN = 32


@st.composite
def samples(draw: st.DrawFn) -> list[TrainSample]:
    lengths = draw(st.lists(st.integers(2, 48), min_size=1, max_size=40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    made = []
    for index, length in enumerate(lengths):
        mask = rng.random(length) < 0.5
        mask[1] = True  # each has something to learn
        ids = np.arange(length, dtype=np.int32) + 1000 * index  # every token of every sample is unlike any other
        made.append(
            TrainSample(
                token_ids=ids,
                loss_mask=mask,
                logprobs=-ids.astype(np.float32),
                advantage=float(index),
                temperature=1.0 + index,
                env_index=index % 3,
                rollout_id=str(index),
                rl_weights=0.5 + ids.astype(np.float32) if index % 2 else None,
                ce_weights=(~mask).astype(np.float32) if index % 5 == 0 else None,
            )
        )
    return made


@settings(max_examples=40, deadline=None)
@given(samples(), st.integers(1, 4))
def test_every_token_is_packed_once_in_order_beside_what_belongs_to_it(made: list[TrainSample], dp_size: int) -> None:
    packing = pack_samples(made, seq_len=SEQ_LEN, dp_size=dp_size)
    seen: set[str] = set()
    loss_tokens = 0
    for row in packing.micro_batches:
        assert 1 <= len(row.token_ids) <= SEQ_LEN
        assert row.sample_offsets[0] == 0
        assert row.sample_offsets[-1] == len(row.token_ids)
        loss_tokens += int(row.loss_mask.sum())
        if not row.loss_mask.any():  # a filler, which repeats a sample
            continue
        for place, rollout_id in enumerate(row.rollout_ids):
            part = slice(row.sample_offsets[place], row.sample_offsets[place + 1])
            source = made[int(rollout_id)]
            length = min(SEQ_LEN, len(source.token_ids))
            mask = source.loss_mask[:length].copy()
            mask[0] = False
            assert rollout_id not in seen
            seen.add(rollout_id)
            np.testing.assert_array_equal(row.token_ids[part], source.token_ids[:length])
            np.testing.assert_array_equal(row.position_ids[part], np.arange(length))
            np.testing.assert_array_equal(row.loss_mask[part], mask)
            np.testing.assert_array_equal(row.inference_logprobs[part], np.where(mask, source.logprobs[:length], 0))
            np.testing.assert_array_equal(row.advantages[part], np.where(mask, source.advantage, 0))
            if source.rl_weights is not None:
                np.testing.assert_array_equal(row.rl_weights[part], source.rl_weights[:length])
            elif row.rl_weights is not None:
                assert (row.rl_weights[part] == 1.0).all()
            if source.ce_weights is not None:
                np.testing.assert_array_equal(row.ce_weights[part][1:], source.ce_weights[1:length])
            elif row.ce_weights is not None:
                assert not row.ce_weights[part].any()
            assert row.temperatures[place] == source.temperature
            assert row.env_index[place] == source.env_index
    assert seen == {sample.rollout_id for sample in made}
    assert packing.loss_tokens == loss_tokens


@settings(max_examples=40, deadline=None)
@given(samples(), st.integers(1, 4))
def test_ranks_get_as_many_rows_each(made: list[TrainSample], dp_size: int) -> None:
    rows = pack_samples(made, seq_len=SEQ_LEN, dp_size=dp_size).micro_batches
    assert [row.dp_rank for row in rows] == [index % dp_size for index in range(len(rows))]
    assert len(rows) % dp_size == 0


@settings(max_examples=40, deadline=None)
@given(samples(), st.integers(1, 4))
def test_packing_is_deterministic(made: list[TrainSample], dp_size: int) -> None:
    first, second = (pack_samples(made, seq_len=SEQ_LEN, dp_size=dp_size) for _ in range(2))
    for one, other in zip(first.micro_batches, second.micro_batches, strict=True):
        assert one.rollout_ids == other.rollout_ids
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
