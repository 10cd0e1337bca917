"""A trainer replays the routes of vLLM: on one GPU, in bfloat16, with routers that are off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_mesh import EngineKind, EngineMesh
from meshrl.core.config.shared import ModelConfig
from meshrl.models.load import load_model
from meshrl.models.logprobs import PackedPolicy
from meshrl.wire import completion_frame
from plain_model import VOCAB
from replayed import mismatches, sampled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPT, COMPLETION = 8, 100
OFF = 0.02  # of the routers' weights


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineMesh]:
    pytest.importorskip("vllm")
    kind = EngineKind(
        name="vllm",
        python=Path(sys.executable),
        dtype=torch.bfloat16,
        device="cuda",
        clear_margin=0.1,
        logprob_atol=0.15,
        logprob_mean=0.035,
        family="qwen3_moe",
        config={"enforce_eager": True, "gpu_memory_utilization": 0.2, "enable_return_routed_experts": True},
    )
    made = EngineMesh(kind, tmp_path_factory.mktemp("mesh"))
    yield made
    made.close()


async def test_a_trainer_with_other_routers_is_nearer_to_vllm_by_its_routes(mesh: EngineMesh) -> None:
    """Routes of whole sequences, and of a second turn from the end of its prompt on, which is what turns ask for."""
    await mesh.publish(mesh.base_seed)  # the weights of the folder that the trainer loads
    rng = np.random.default_rng(3)
    samples = []
    async with mesh.session() as session:
        for number in range(8):
            prompt = rng.integers(2, VOCAB, PROMPT).tolist()
            sampling = {"max_tokens": COMPLETION, "ignore_eos": True, "logprobs": 1, "seed": number}
            for start in (0, PROMPT):
                body = {"token_ids": prompt, "sampling_params": {**sampling, "routed_experts_prompt_start": start}}
                headers = {"Accept": completion_frame.MEDIA_TYPE}
                async with session.post("/inference/v1/generate", json=body, headers=headers) as response:
                    choice = completion_frame.decode(await response.read()).choices[0]
                assert choice.routed_experts is not None
                assert choice.routed_experts.shape == (PROMPT + COMPLETION - 1 - start, 2, 2)
                if start == 0:
                    samples.append(sampled(prompt, choice.token_ids.tolist(), choice.logprobs, choice.routed_experts))
    model = load_model(ModelConfig(name=str(mesh.model_folder), dtype="bfloat16"))
    policy = PackedPolicy(model, compute_dtype=torch.bfloat16)
    replayed, without = mismatches(policy, samples, off=OFF)
    print(f"mismatch KL {without:.3g} by the trainer's own routers, {replayed:.3g} by vLLM's routes")
    assert without > 5 * replayed > 0.0
