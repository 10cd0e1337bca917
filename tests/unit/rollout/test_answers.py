"""What a model call sampled, read from a frame or from JSON in either spelling."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from meshrl.rollout.engines.calls import Call, EngineAnswer, read
from meshrl.wire.completion_frame import MEDIA_TYPE, CompletionFrame, FrameChoice, encode
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionSpan

LOGPROBS = {"content": [{"logprob": -0.5}, {"logprob": -1.5}, {"logprob": -0.25}]}


def answered(choice: dict[str, Any], before: int | None = 3, after: int | None = 4) -> EngineAnswer:
    choice = {"token_ids": [5, 6, 7], "logprobs": LOGPROBS, "finish_reason": "stop", **choice}
    return EngineAnswer(json.dumps({"request_id": "r", "choices": [choice]}).encode(), before, after)


def framed(logprobs: list[float] | None, spans: tuple[VersionSpan, ...] = ()) -> EngineAnswer:
    choice = FrameChoice(
        token_ids=np.array([5, 6, 7], np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        version_spans=spans,
        finish_reason="stop",
    )
    return EngineAnswer(encode(CompletionFrame(request_id="r", prompt_tokens=2, choices=(choice,))), 3, 4, MEDIA_TYPE)


def test_frames_and_both_kinds_of_json_say_the_same():
    spans = (VersionSpan(start=0, end=2, version=3), VersionSpan(start=2, end=3, version=4))
    packed = base64.b64encode(np.array([-0.5, -1.5, -0.25], "<f4").tobytes()).decode()
    ours = {"version_spans": [[0, 2, 3], [2, 3, 4]], "completion_logprobs": {"data": packed, "dtype": "float32"}}
    theirs = {"weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]}
    wanted = Call(
        request_id="r",
        completion_ids=[5, 6, 7],
        logprobs=[-0.5, -1.5, -0.25],
        version_spans=spans,
        finish_reason="stop",
    )
    assert read(framed([-0.5, -1.5, -0.25], spans)) == wanted
    assert read(answered({**ours, "logprobs": None})) == wanted
    assert read(answered(theirs)) == wanted


def test_versions_that_are_no_numbers_count_as_the_older_one_around_the_call():
    named = {"weight_versions": [{"version": "default", "start": 0, "end": 3}]}
    for answer, version in (
        (answered(named, 5, 6), 5),
        (answered({}, None, 6), 6),
        (answered({}, None, None), 0),
        (framed([-0.5, -1.5, -0.25]), 3),
    ):
        assert read(answer).version_spans == (VersionSpan(start=0, end=3, version=version),)


def test_an_empty_completion_has_no_spans():
    nothing = {"token_ids": [], "logprobs": {"content": []}}
    assert read(answered(nothing)).version_spans == ()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (framed(None), "a frame without logprobs"),
        (framed([-0.5, float("nan"), -0.5]), "no finite logprob"),
        (framed([-0.5, -9999.0, -0.5]), "no finite logprob"),
        (EngineAnswer(b"MRCF", 3, 3, MEDIA_TYPE), "binary answer cannot be read"),
        (answered({"logprobs": None}), "0 logprobs for 3 sampled tokens"),
        (answered({"logprobs": {"content": [{"logprob": None}] * 3}}), "no finite logprob"),
        (answered({"token_ids": None}), "cannot be read"),
        (EngineAnswer(b"{}", 3, 3), "KeyError"),
        (EngineAnswer(b"<html>", 3, 3, "text/html"), "cannot be read"),
    ],
)
def test_an_answer_without_evidence_of_its_tokens_is_the_engines_fault(answer: EngineAnswer, words: str):
    with pytest.raises(MeshError, match=words) as caught:
        read(answer)
    assert caught.value.reason is Reason.ENGINE_FAILED


def test_prompt_of_an_older_version_is_said_by_frames_and_json_alike() -> None:
    older = (VersionSpan(start=0, end=3, version=4, prompt_version=2),)
    assert read(framed([-0.5, -1.5, -0.25], older)).version_spans == older
    assert read(answered({"version_spans": [[0, 3, 4]], "prompt_version": 2})).version_spans == older
    same = (VersionSpan(start=0, end=3, version=4),)
    assert read(framed([-0.5, -1.5, -0.25], same)).version_spans == same
    assert read(answered({"version_spans": [[0, 3, 4]], "prompt_version": 4})).version_spans == same
