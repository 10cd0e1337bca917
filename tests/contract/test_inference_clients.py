"""The inference server through the clients that the rollout side uses: `renderers`, openai; over a real socket."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import renderers
from openai import AsyncOpenAI
from renderers.client import OverlongPromptError, generate

from inference_kit import full_forward, make_model, make_tokenizer, served

MAX_LEN = 128


@pytest.fixture
async def client() -> AsyncIterator[AsyncOpenAI]:
    async with (
        served(make_model(), make_tokenizer(), model_name="tiny", max_model_len=MAX_LEN, eos_token_ids=(0,)) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai,
    ):
        yield openai


class _Renderer(renderers.DefaultRenderer):
    """The fallback renderer, which works with any chat template, with a stop token."""

    def get_stop_token_ids(self) -> list[int]:
        return [0]


def renderer() -> _Renderer:
    return _Renderer(make_tokenizer())


async def test_renderers_reads_tokens_logprobs_and_weight_versions(client: AsyncOpenAI) -> None:
    sampling = {"max_tokens": 20, "temperature": 0.9, "seed": 1, "ignore_eos": True, "min_tokens": 5}
    result = await generate(
        client=client, renderer=renderer(), messages=[{"role": "user", "content": "abc"}], model="tiny",
        sampling_params=sampling,
    )  # fmt: skip
    assert make_tokenizer().decode(result["prompt_ids"]) == "u:abc\na:"
    completion = result["completion_ids"]
    assert 5 <= len(completion) <= 20
    assert result["completion_logprobs"].dtype == np.float32
    expected = full_forward(make_model(), result["prompt_ids"], completion, 0.9)
    # until min_tokens the stop token is cut, so those logprobs are of the rest of the distribution
    np.testing.assert_allclose(result["completion_logprobs"][5:], expected[5:], atol=1e-4)
    assert result["weight_versions"] == [{"version": 0, "start": 0, "end": len(completion)}]
    assert result["finish_reason"] in {"stop", "length"}
    assert result["usage"]["completion_tokens"] == len(completion)


async def test_renderers_reads_a_head_of_alternatives(client: AsyncOpenAI) -> None:
    result = await generate(
        client=client, renderer=renderer(), messages=[{"role": "user", "content": "abc"}], model="tiny",
        sampling_params={"max_tokens": 6, "logprobs": 3},
    )  # fmt: skip
    assert [len(ids) for ids in result["completion_top_ids"]] == [3] * len(result["completion_ids"])


async def test_renderers_learns_the_context_length_and_refuses_a_longer_prompt(client: AsyncOpenAI) -> None:
    with pytest.raises(OverlongPromptError) as refused:
        await generate(
            client=client, renderer=renderer(), messages=[], model="tiny", prompt_ids=[1] * (MAX_LEN + 1),
            sampling_params={"max_tokens": 1},
        )  # fmt: skip
    assert refused.value.max_prompt_len == MAX_LEN
