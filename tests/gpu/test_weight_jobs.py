"""Weight jobs of a vLLM worker on a GPU; needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from meshrl.inference.vllm.jobs import Job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEADLINE_S = 60.0
PORTION_BYTES = 2**28


def test_versions_one_after_the_other_take_the_memory_of_one() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before, job = torch.cuda.memory_reserved(device), None
    for _ in range(8):
        job = Job(lambda: torch.empty(PORTION_BYTES, dtype=torch.uint8, device=device).zero_(), device, after=job)
        assert job.join(DEADLINE_S)
        assert job.outcome is not None
        assert "seconds" in job.outcome
    assert torch.cuda.memory_reserved(device) - before <= PORTION_BYTES
