"""What the token-in route answers beyond plain JSON: completion frames, prompt logprobs, routed experts."""

import base64
import io
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference_kit import EngineFactory, Start, unpack
from meshrl.inference.engine import FinishReason, GenerateRequest, PromptLogprobs, TokenChunk
from meshrl.wire.completion_frame import MEDIA_TYPE, decode
from meshrl.wire.types import VersionSpan

ACCEPT = {"Accept": f"{MEDIA_TYPE}, application/json"}
PATH = "/inference/v1/generate"


async def test_a_frame_holds_what_the_json_answer_holds(serve: Start, start_engine: EngineFactory) -> None:
    client = await serve(await start_engine(version=4))
    sampling = {
        "max_tokens": 9,
        "n": 3,
        "logprobs": 1,
        "seed": 3,
        "temperature": 0.7,
        "extra_args": {"raw_logprobs": True},
    }
    body = {"request_id": "mine", "token_ids": [1, 2, 3], "sampling_params": sampling}
    async with client.post(PATH, json=body) as response:
        assert response.content_type == "application/json"
        plain = await response.json()
    assert plain["usage"] == {"prompt_tokens": 3, "completion_tokens": 27, "total_tokens": 30}
    async with client.post(PATH, json=body, headers=ACCEPT) as response:
        assert (response.content_type, response.headers["X-Policy-Version"]) == (MEDIA_TYPE, "4")
        frame = decode(await response.read())
    assert (frame.request_id, frame.prompt_tokens, len(frame.choices)) == ("mine", 3, 3)
    for wanted, got in zip(plain["choices"], frame.choices, strict=True):
        assert got.token_ids.tolist() == wanted["token_ids"]
        assert got.finish_reason == wanted["finish_reason"] == "length"
        assert [[span.start, span.end, span.version] for span in got.version_spans] == wanted["version_spans"]
        for values, field in ((got.logprobs, "completion_logprobs"), (got.raw_logprobs, "raw_logprobs")):
            assert values is not None
            # another batch composition may round otherwise
            np.testing.assert_allclose(values, unpack(wanted[field]), atol=1e-5)
    assert len({tuple(choice.token_ids.tolist()) for choice in frame.choices}) == 3


async def test_a_frame_names_the_token_that_ended_the_completion(serve: Start, start_engine: EngineFactory) -> None:
    client = await serve(await start_engine())
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 90, "stop_token_ids": list(range(20)), "seed": 1}}
    async with client.post(PATH, json=body, headers=ACCEPT) as response:
        [choice] = decode(await response.read()).choices
    assert choice.finish_reason == "stop"
    assert choice.stop_token_id == choice.token_ids[-1] < 20
    assert choice.logprobs is None  # not asked for


@pytest.mark.parametrize("more", [{"logprobs": 4}, {"logprobs": 1, "stream": True}], ids=["alternatives", "stream"])
async def test_what_a_frame_cannot_carry_is_answered_in_json(
    serve: Start, start_engine: EngineFactory, more: dict[str, Any]
) -> None:
    client = await serve(await start_engine())
    stream = more.pop("stream", False)
    body = {"token_ids": [1], "stream": stream, "sampling_params": {"max_tokens": 2, **more}}
    async with client.post(PATH, json=body, headers=ACCEPT) as response:
        assert response.content_type == ("text/event-stream" if stream else "application/json")


async def test_prompt_logprobs_of_several_passes_are_those_of_transformers_forward_pass(
    serve: Start, start_engine: EngineFactory, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine contract has those of one pass."""
    monkeypatch.setattr("meshrl.inference.embedded.runner.SCORED_LOGITS", 1)
    client = await serve(await start_engine())
    prompt = [5, 9, 2, 39, 7, 7, 31]
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 3, "temperature": 0.5}}
    async with client.post(PATH, json=body, headers=ACCEPT) as response:
        assert response.content_type == "application/json"
        first, *entries = (await response.json())["prompt_logprobs"]
    assert first is None
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.tensor([prompt])).logits[0]
    logprobs_TV = logits_TV.log_softmax(-1)
    expected = logprobs_TV[range(len(prompt) - 1), prompt[1:]]
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=True)]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
    for entry, logprobs_V in zip(entries, logprobs_TV, strict=False):
        values, ids = logprobs_V.topk(3)
        ranked = {said["rank"]: (token, said["logprob"]) for token, said in entry.items() if said["rank"] is not None}
        assert [ranked[rank][0] for rank in (1, 2, 3)] == list(map(str, ids.tolist()))
        assert [ranked[rank][1] for rank in (1, 2, 3)] == pytest.approx(values.tolist(), abs=1e-4)


class RichEngine:
    """Answers with everything that an engine may report."""

    version, root, adapters, runs, max_model_len = 1, None, None, {}, 96

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.asked.append(request)
        yield TokenChunk(
            start=0,
            token_ids=np.array([7, 8], np.int32),
            logprobs=np.array([-0.5, -0.25], np.float32),
            version_spans=(VersionSpan(start=0, end=2, version=1),),
            finish_reason=FinishReason.LENGTH,
            prompt_logprobs=PromptLogprobs(logprobs=np.array([np.nan, -2.0, -np.inf], np.float32)),
            routed_experts=np.arange(4, dtype=np.uint8).reshape(1, 2, 2),
        )


async def test_prompt_logprobs_and_routed_experts_are_spelled_as_vllm_does(serve: Start) -> None:
    engine = RichEngine()
    client = await serve(engine)
    body = {"token_ids": [4, 5, 6], "sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}}
    async with client.post(PATH, json=body, headers=ACCEPT) as response:
        answer = await response.json()
    assert engine.asked[0].sampling.prompt_logprobs == 1
    assert answer["prompt_logprobs"] == [
        None,
        {"5": {"logprob": -2.0, "rank": None, "decoded_token": None}},
        {"6": {"logprob": -9999.0, "rank": None, "decoded_token": None}},
    ]
    experts = np.load(io.BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))
    assert experts.tolist() == [[[0, 1], [2, 3]]]


@pytest.mark.parametrize(("sampling", "wanted"), [({}, False), ({"logprobs": 1}, True), ({"logprobs": 0}, True)])
async def test_an_engine_hears_whether_anybody_reads_logprobs(
    serve: Start, sampling: dict[str, Any], wanted: bool
) -> None:
    engine = RichEngine()
    client = await serve(engine)
    await client.post(PATH, json={"token_ids": [4], "sampling_params": {"max_tokens": 2, **sampling}})
    assert engine.asked[0].sampling.logprobs is wanted
