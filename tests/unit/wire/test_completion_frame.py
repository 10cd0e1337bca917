"""Completion frames keep every token, logprob and span, and say what is wrong with bytes that are none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.wire.completion_frame import CompletionFrame, FrameChoice, decode, encode
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionSpan


@st.composite
def choices(draw: st.DrawFn) -> FrameChoice:
    count = draw(st.integers(0, 40))
    data = st.binary(min_size=4 * count, max_size=4 * count)
    floats = data.map(lambda data: np.frombuffer(data, np.float32))  # of any bits
    cut = draw(st.integers(0, count))
    spans = [
        VersionSpan(
            start=0, end=cut, version=draw(st.integers(0, 2**62)), prompt_version=draw(st.none() | st.integers(0, 9))
        ),
        VersionSpan(start=cut, end=count, version=7),
    ]
    return FrameChoice(
        token_ids=np.frombuffer(draw(data), np.int32),
        logprobs=draw(st.none() | floats),
        raw_logprobs=draw(st.none() | floats),
        version_spans=tuple(spans[: draw(st.integers(0, 2))]),
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])),
        stop_token_id=draw(st.none() | st.integers(0, 2**31)),
    )


def same(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    return left is right if left is None or right is None else left.tobytes() == right.tobytes()


@given(st.lists(choices(), max_size=4), st.text(max_size=20), st.integers(0, 2**31))
def test_a_frame_comes_back_as_it_went(parts: list[FrameChoice], name: str, prompt_tokens: int) -> None:
    data = encode(CompletionFrame(request_id=name, prompt_tokens=prompt_tokens, choices=tuple(parts)))
    back = decode(data)
    assert (back.request_id, back.prompt_tokens, len(back.choices)) == (name, prompt_tokens, len(parts))
    for sent, got in zip(parts, back.choices, strict=True):
        assert (sent.version_spans, sent.finish_reason, sent.stop_token_id) == (
            got.version_spans, got.finish_reason, got.stop_token_id,
        )  # fmt: skip
        assert same(sent.token_ids, got.token_ids)
        assert same(sent.logprobs, got.logprobs)
        assert same(sent.raw_logprobs, got.raw_logprobs)


def frame() -> bytes:
    choice = FrameChoice(
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.5, -1.5], np.float32),
        version_spans=(VersionSpan(start=0, end=2, version=3),),
        finish_reason="stop",
        stop_token_id=6,
    )
    return encode(CompletionFrame(request_id="r", prompt_tokens=4, choices=(choice,)))


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (b"", "unpack_from requires"),
        (b'{"choices": []}        ', "unpack_from requires"),
        (b"MRCX" + frame()[4:], "expected b'MRCF', format 1"),
        (frame()[:-1], "buffer is smaller"),
        (frame()[:-9], "buffer is smaller"),
        (frame() + b"x", "its choices end at 88"),
        (frame()[:48] + b"\x09" + frame()[49:], "out of range"),
    ],
)
def test_bytes_that_are_no_frame_are_the_engines_fault(damaged: bytes, words: str) -> None:
    with pytest.raises(MeshError, match=words) as caught:
        decode(damaged)
    assert caught.value.reason is Reason.ENGINE_FAILED
