"""Whatever the arrays, chunks and bytes, the codec gives back what went in or refuses with INVALID_REQUEST."""

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshrl.v1 import tensor_pb2, trainer_pb2
from meshrl.v1 import weights_pb2 as pb
from meshrl.wire import convert, frames, tensors
from meshrl.wire import types as wire_types
from meshrl.wire.errors import FieldViolation, MeshError, Reason, from_rpc_status, to_rpc_status
from meshrl.wire.types import (
    AgentCommand,
    Batch,
    BatchHeader,
    Chunk,
    MicroBatch,
    RolloutEvent,
    Sample,
    StepEvent,
    VersionEvent,
    VersionInfo,
    VersionProbe,
    VersionSpan,
)
from meshrl.wire.types.routes import Routes

ARRAYS = st.sampled_from(sorted(tensors.DTYPES)).flatmap(
    lambda name: st.tuples(
        st.just(name), hnp.arrays(tensors.DTYPES[name].storage, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
    )
)
CHUNKS = st.builds(
    Chunk,
    offset=st.integers(0, 2**64 - 1),
    data=st.binary(max_size=300) | st.binary(max_size=300).map(memoryview),
    crc32c=st.integers(0, 2**32 - 1),
)


def outcome_of(call):
    """What a call returns, or the MeshError that it raises; anything else fails the test."""
    try:
        return call()
    except MeshError as error:
        return error


@given(ARRAYS)
def test_tensors_come_back_to_the_bit(named):
    name, array = named
    message = tensor_pb2.Tensor.FromString(tensors.encode(array, name).SerializeToString())
    back = tensors.decode(message, expect=name, ndim=array.ndim)
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(
    st.integers(0, 20),
    st.lists(st.integers(-2, 2**40), max_size=5),
    st.binary(max_size=40),
)
def test_arbitrary_tensors_decode_or_are_refused(dtype, shape, data):
    message = tensor_pb2.Tensor(dtype=dtype, shape=shape, data=data)
    outcome = outcome_of(lambda: tensors.decode(message, field="x"))
    if isinstance(outcome, MeshError):
        assert outcome.reason is Reason.INVALID_REQUEST
        assert all(violation.field.startswith("x.") for violation in outcome.violations)
    else:
        assert outcome.nbytes == len(data)
        assert list(outcome.shape) == shape


@given(CHUNKS)
@example(Chunk(offset=2**40, data=b"x" * 300, crc32c=7))  # a length of two bytes, which chance seldom draws
def test_frames_equal_protobuf_and_parse_back(chunk):
    upload, fetched = frames.frame_upload_chunk(chunk), frames.frame_fetch_chunk(chunk)
    assert upload == pb.CreateVersionRequest(chunk=convert.to_proto(chunk)).SerializeToString()
    assert fetched == pb.FetchResponse(chunk=convert.to_proto(chunk)).SerializeToString()
    for parsed in (frames.parse_upload(upload), frames.parse_fetch(fetched)):
        assert (parsed.offset, bytes(parsed.data), parsed.crc32c) == (chunk.offset, bytes(chunk.data), chunk.crc32c)


@given(
    st.binary(max_size=60)
    | CHUNKS.map(frames.frame_fetch_chunk).flatmap(
        lambda framed: st.integers(0, len(framed)).map(lambda cut: framed[:cut])
    )
)
def test_arbitrary_bytes_parse_as_protobuf_would_or_are_refused(message):
    outcome = outcome_of(lambda: frames.parse_fetch(message))
    if isinstance(outcome, MeshError):
        assert outcome.reason is Reason.INVALID_REQUEST
    else:
        same = pb.FetchResponse.FromString(message).chunk
        assert (outcome.offset, bytes(outcome.data), outcome.crc32c) == (same.offset, same.data, same.crc32c)


def routes(num_tokens):
    """(T, L, K) experts that tokens went through."""
    shapes = st.tuples(num_tokens, st.integers(1, 2), st.integers(1, 2))
    return st.one_of(hnp.arrays(np.uint8, shapes), hnp.arrays(np.int16, shapes))


@st.composite
def samples(draw):
    num_tokens = draw(st.integers(1, 12))
    loss_mask = draw(hnp.arrays(np.bool_, num_tokens))
    cuts = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=3)) | {num_tokens})
    spans = [
        VersionSpan(start=start, end=end, version=draw(st.integers(0, 2**64 - 1)))
        for start, end in zip([0, *cuts[:-1]], cuts, strict=True)
    ]
    return Sample(
        token_ids=draw(hnp.arrays(np.int32, num_tokens)),
        loss_mask=loss_mask,
        logprobs=draw(hnp.arrays(np.float32, num_tokens)),
        version_spans=tuple(spans),
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0])),
        routed_experts=draw(st.none() | routes(st.just(num_tokens))),
    )


@st.composite
def probes(draw):
    logprobs = draw(st.lists(FLOATS, min_size=1, max_size=5))
    token_ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(logprobs) + 1, max_size=len(logprobs) + 1))
    return VersionProbe(token_ids=tuple(token_ids), logprobs=tuple(logprobs))


FLOATS = st.floats(-1e6, 1e6, width=32).map(lambda value: float(str(np.float32(value))))
PLAIN = {bool: st.booleans(), int: st.integers(0, 2**31 - 1), float: FLOATS, str: st.text(max_size=5)}
DTYPE = st.sampled_from(sorted(tensors.DTYPES))
TIMES = st.none() | st.floats(1e9, 9e9)
"""Seconds of the epoch, to the bit: a float has no more than 120 ns of them, a message has whole ns."""
BULK = (Batch, BatchHeader, MicroBatch)
"""They have functions of their own, and tests below."""
OWN_FUNCTIONS = {
    **dict.fromkeys(typing.get_args(AgentCommand), (convert.agent_command_to_proto, convert.agent_command_from_proto)),
    **dict.fromkeys(typing.get_args(RolloutEvent), (convert.rollout_event_to_proto, convert.rollout_event_from_proto)),
    StepEvent: (convert.to_proto, convert.step_event_from_proto),
    VersionInfo: (convert.to_proto, convert.version_info_from_proto),
    VersionEvent: (convert.to_proto, convert.version_event_from_proto),
}
EITHER = {"task_payload": "task_index", "exact_version": "min_version", "content_start": "", "content_end": ""}
"""Fields that are unset where the other is set; the two of a content are set together or not at all."""


@functools.cache
def values_of(annotation):
    """Any value that a field with this annotation may have."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if annotation is bytes or bytes in arguments:
        return st.binary(max_size=5)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if annotation is Sample:
        return samples()
    if annotation is VersionProbe:
        return probes()
    if annotation == Routes:
        return routes(st.integers(0, 3))
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        own = {name: DTYPE for name in hints if name == "dtype"} | {
            name: TIMES for name in hints if name.split("_")[-1] == "time"
        }
        fields = {name: own[name] if name in own else values_of(hint) for name, hint in hints.items()}
        return st.builds(annotation, **fields).map(with_one_of_two)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if option is types.NoneType else values_of(option) for option in arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is Mapping:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    return hnp.arrays(np.float32, st.integers(0, 3), elements=st.floats(-9, 9, width=32))  # the only vectors left


def with_one_of_two(value):
    unset = {
        field: None
        for field, other in EITHER.items()
        if hasattr(value, field) and (not other or getattr(value, other) is not None)
    }
    return dataclasses.replace(value, **unset)


def same(left, right):
    """Equality that looks into arrays, which dataclasses do not compare."""
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    return left == right


MESSAGES = [
    kind
    for kind in vars(wire_types).values()
    if dataclasses.is_dataclass(kind) and kind not in BULK and kind.__name__ != "FoundVersion"
]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_every_message_comes_back_with_every_field(kind, data):
    value = data.draw(values_of(kind))
    to_proto, back = OWN_FUNCTIONS.get(kind, (convert.to_proto, lambda message: convert.from_proto(kind, message)))
    message = to_proto(value)
    assert same(value, back(type(message).FromString(message.SerializeToString())))


FINITE = st.floats(-100.0, 0.0, width=32)


@st.composite
def micro_batches(draw):
    num_tokens = draw(st.integers(1, 12))
    starts = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=3)) - {num_tokens} | {0})
    num_samples = len(starts)

    def per_token(dtype=np.float32, **how):
        return draw(hnp.arrays(dtype, num_tokens, **how))

    def weights():
        values = per_token(elements=st.sampled_from([0.0, 0.25, -1.0, 3.5]))
        values[starts] = 0.0
        return values

    with_ref = draw(st.booleans())
    return MicroBatch(
        dp_rank=0,
        token_ids=per_token(np.int32),
        position_ids=per_token(np.int32),
        loss_mask=per_token(np.bool_),
        advantages=per_token(elements=FINITE),
        inference_logprobs=per_token(elements=FINITE),
        sample_offsets=np.array([*starts, num_tokens], dtype=np.int64),
        temperatures=np.ones(num_samples, dtype=np.float32),
        env_index=np.zeros(num_samples, dtype=np.int32),
        rollout_ids=tuple(str(index) for index in range(num_samples)),
        traceparents=draw(st.sampled_from([(), ("t",)])),
        rl_weights=per_token(elements=FINITE) if draw(st.booleans()) else None,
        ce_weights=weights() if draw(st.booleans()) else None,
        ref_kl_weights=weights() if with_ref else None,
        ref_logprobs=per_token(elements=FINITE) if with_ref else None,
        ref_top_ids=np.arange(-1, 2 * num_tokens - 1, dtype=np.int32).reshape(-1, 2) if with_ref else None,
        ref_top_logprobs=-np.ones((num_tokens, 2), dtype=np.float32) if with_ref else None,
    )


@given(st.lists(micro_batches(), min_size=1, max_size=3))
def test_batches_come_back_to_the_bit_or_are_refused_for_having_nothing_to_train(rows):
    loss_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    batch = Batch(run_id="r", step=1, micro_batches=tuple(rows), loss_tokens=loss_tokens, environments=("e",))
    reader = convert.BatchReader(seq_len=16)
    for message in convert.batch_to_messages(batch):
        reader.feed(trainer_pb2.SubmitBatchRequest.FromString(message.SerializeToString()))
    outcome = outcome_of(reader.finish)
    trained = [row.loss_mask for row in rows] + [w for row in rows for w in (row.ce_weights, row.ref_kl_weights)]
    if not any(tokens is not None and tokens.any() for tokens in trained):
        assert [violation.field for violation in outcome.violations] == ["loss_mask"]
        return
    assert convert.batch_digest(outcome) == convert.batch_digest(batch)
    assert (outcome.run_id, outcome.step, outcome.environments) == ("r", 1, ("e",))
    assert outcome.loss_tokens == loss_tokens
    for sent, got in zip(rows, outcome.micro_batches, strict=True):
        for name in MicroBatch.__dataclass_fields__:
            before, after = getattr(sent, name), getattr(got, name)
            same = before.tobytes() == after.tobytes() if isinstance(before, np.ndarray) else before == after
            assert same, name


@given(st.binary(max_size=200))
def test_arbitrary_micro_batches_convert_or_are_refused(data):
    try:
        message = trainer_pb2.MicroBatch.FromString(data)
    except DecodeError:  # refused by protobuf before it comes to us
        return
    outcome = outcome_of(lambda: convert.micro_batch_from_proto(message))
    assert not isinstance(outcome, MeshError) or outcome.reason is Reason.INVALID_REQUEST


TEXTS = st.text(max_size=3) | st.builds(lambda char, length: char * length, st.characters(), st.integers(0, 2000))


@settings(max_examples=25)
@given(
    st.sampled_from(Reason),
    TEXTS,
    st.lists(st.builds(FieldViolation, TEXTS, TEXTS), max_size=30),
    st.none() | st.floats(0, 1e6),
    st.dictionaries(TEXTS, TEXTS, max_size=10),
)
def test_every_error_fits_into_metadata_and_keeps_its_reason(reason, text, violations, retry_after_s, metadata):
    status = to_rpc_status(
        MeshError(reason, text, violations=violations, retry_after_s=retry_after_s, metadata=metadata)
    )
    assert status.ByteSize() * 4 / 3 < 8000
    back = from_rpc_status(status)
    assert back.reason is reason
    assert (back.retry_after_s is None) == (retry_after_s is None)
    assert len(back.violations) == min(len(violations), 21)
