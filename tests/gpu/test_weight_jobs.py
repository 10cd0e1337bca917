"""Versions one after the other on a GPU, published and staged, take the memory of one; needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from meshrl.inference.vllm.jobs import Job
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.snapshot import SideStream, take_snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEADLINE_S = 60.0
PORTION_BYTES = 2**28


def portion(device: torch.device) -> None:
    torch.empty(PORTION_BYTES, dtype=torch.uint8, device=device).zero_()


def test_jobs_of_a_worker_that_stage_versions() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before, job = torch.cuda.memory_reserved(device), None
    for _ in range(8):
        job = Job(lambda: portion(device), device, after=job)
        assert job.join(DEADLINE_S)
        assert job.outcome is not None
        assert "seconds" in job.outcome
    assert torch.cuda.memory_reserved(device) - before <= PORTION_BYTES


def test_a_publisher_that_encodes_snapshots() -> None:
    device, side = torch.device("cuda", 0), SideStream()
    plan = PublishPlan(tensors=())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    for _ in range(8):
        with side.reading(take_snapshot(plan, {}, 0, device)):
            portion(device)
    assert torch.cuda.memory_reserved(device) - before <= PORTION_BYTES + 2**21  # what a snapshot of nothing takes
