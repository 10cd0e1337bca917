"""The RolloutService of clients/typescript on the real embedded engine: it plays groups and keeps the contract."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc.aio
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import node_service
from conformance_kit import verdict
from inference_kit import make_model, served
from local_ports import free_port
from meshrl.client import RolloutClient
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc as pb_grpc
from meshrl.wire.types import Rollout, Sampling

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("npm") is None and "CI" not in os.environ,
        reason="the service of clients/typescript needs Node.js and npm",
    ),
]
UP_S = 120.0


class OneEngine(pb_grpc.WeightSyncServicer):
    """A hub that names one engine."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ListEngines(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return pb.ListEnginesResponse(engines=[pb.EngineInfo(engine_id="e0", url=self.url, routable=True)])


@pytest.fixture
async def engine(tokenizer_dir: Any) -> AsyncIterator[SimpleNamespace]:
    """A small engine that serves version 3, and the hub that names it."""
    model = make_model(vocab_size=99, eos_token_id=2)
    async with served(model, AutoTokenizer.from_pretrained(tokenizer_dir), version=3) as server:
        hub = grpc.aio.server()
        pb_grpc.add_WeightSyncServicer_to_server(OneEngine(server.url), hub)
        port = hub.add_insecure_port("127.0.0.1:0")
        await hub.start()
        yield SimpleNamespace(hub=f"127.0.0.1:{port}", model=model)
        await hub.stop(None)


@pytest.fixture
async def service(engine: SimpleNamespace) -> AsyncIterator[str]:
    """The address of a service that runs."""
    port = free_port()
    command = await asyncio.to_thread(node_service.command, port=port, hub=engine.hub)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    async with RolloutClient(f"127.0.0.1:{port}") as client:
        await client.wait_until_serving(UP_S)
    yield f"127.0.0.1:{port}"
    process.terminate()
    assert await asyncio.wait_for(process.wait(), UP_S) == 0


def logprobs_of(model: Any, rollout: Rollout) -> np.ndarray:
    """(T,) what the model says of a sample's tokens; 0 where the policy sampled nothing."""
    (sample,) = rollout.samples
    ids_T = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        said_TV = model(ids_T[None]).logits[0].float().log_softmax(-1)
    own_T = np.zeros(len(ids_T), np.float32)
    own_T[1:] = said_TV[:-1].gather(1, ids_T[1:, None])[:, 0].numpy()
    return np.where(sample.loss_mask, own_T, 0.0)


async def test_the_typescript_service_keeps_every_rule_and_its_samples_are_what_the_engine_sampled(
    service: str, engine: SimpleNamespace, make_group: Any
) -> None:
    broken, unchecked = await verdict(service, "rollout", full=True)
    assert (broken, set(unchecked)) == ({}, {"rollout.reattach"})  # a capability that it does not list
    async with RolloutClient(service) as client:
        request = make_group(environment="reverse_text_ts", group_size=3, deadline_s=UP_S, sampling=Sampling(seed=1))
        *rollouts, summary = [event async for event in client.run_rollouts(request)]
    assert (summary.finished, summary.failed, summary.cancelled) == (3, 0, 0)
    for rollout in rollouts:
        (sample,) = rollout.samples
        assert {span.version for span in sample.version_spans} == {3}
        np.testing.assert_allclose(sample.logprobs, logprobs_of(engine.model, rollout), atol=1e-4)
        assert rollout.reward == pytest.approx(sum(rollout.reward_parts.values()))
    assert len({rollout.completion for rollout in rollouts}) == 3  # each sampled with its own seed


def test_typescript_computes_the_vectors_and_refuses_what_they_refuse() -> None:
    done = node_service.check_vectors()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 6" in done.stdout
