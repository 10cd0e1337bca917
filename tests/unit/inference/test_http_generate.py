"""What /inference/v1/generate answers in JSON, over a real engine."""

import numpy as np
from transformers import PreTrainedModel

from inference_kit import Start, full_forward, post, unpack


async def test_generate_returns_tokens_logprobs_and_spans(model: PreTrainedModel, serve: Start) -> None:
    client = await serve()
    sampling = {"max_tokens": 9, "logprobs": 1, "seed": 3, "temperature": 0.7, "extra_args": {"raw_logprobs": True}}
    body = {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": {**sampling, "ignore_eos": True}}
    async with client.post("/inference/v1/generate", json=body) as response:
        assert response.headers["X-Policy-Version"] == "0"
        answer = await response.json()
    [choice] = answer["choices"]
    tokens = choice["token_ids"]
    assert (len(tokens), choice["finish_reason"], choice["stop_reason"]) == (9, "length", None)
    assert choice["version_spans"] == [[0, 9, 0]]
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 9}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    logprobs = unpack(choice["completion_logprobs"])
    np.testing.assert_allclose(logprobs, full_forward(model, [1, 2, 3], tokens, 0.7), atol=1e-4)
    np.testing.assert_allclose(unpack(choice["raw_logprobs"]), full_forward(model, [1, 2, 3], tokens), atol=1e-4)
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
    assert np.array_equal(np.array([entry["logprob"] for entry in content], np.float32), logprobs)


async def test_generate_reports_alternatives_and_marks_removed_ones(serve: Start) -> None:
    client = await serve()
    sampling = {"max_tokens": 3, "logprobs": 4, "top_k": 2, "ignore_eos": True}
    _, answer = await post(client, "/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})
    for entry in answer["choices"][0]["logprobs"]["content"]:
        tops = entry["top_logprobs"]
        assert len(tops) == 4
        assert [top["logprob"] for top in tops[2:]] == [-9999.0, -9999.0]
        assert entry["token"] in {top["token"] for top in tops[:2]}
