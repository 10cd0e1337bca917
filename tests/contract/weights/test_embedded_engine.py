"""The embedded engine under the hub: new weights arrive between two steps and requests in flight go on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import torch

from inference_kit import make_model
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.engine import GenerateRequest, SamplingParams
from meshrl.models.state import hf_state
from meshrl.wire.types import Transport, VersionSpan
from weight_mesh import Mesh

LONG = {"max_position_embeddings": 8192, "initializer_range": 0.02}


async def test_request_in_flight_is_kept_across_a_commit_and_says_which_version_sampled_what(
    mesh: Mesh, transport: Transport
) -> None:
    torch.set_num_threads(1)
    served, trained = make_model(0, **LONG), make_model(1, **LONG)
    engine = EmbeddedEngine(
        served,
        max_model_len=8192,
        num_slots=2,
        max_queue=8,
        kv_cache_bytes=2**24,
        eos_token_ids=(),
        seed=0,
        version=None,
    )
    engine.start()
    try:
        mesh.start_agent("e0", engine)
        publisher, client = mesh.publisher(transport), mesh.client()
        await publisher.publish(0, hf_state(make_model(0, **LONG)))
        first = await client.activate_version(run_id="run", version=0, prepare_deadline_s=10.0)
        assert first.engines[0].applied.prepare_s > 0
        assert engine.version == 0

        sampling = SamplingParams(max_tokens=8000, ignore_eos=True, seed=1)
        request = GenerateRequest(request_id="r", prompt_ids=(1, 2, 3), sampling=sampling, stream=True)
        spans: list[VersionSpan] = []
        begun = asyncio.Event()

        async def read() -> None:
            """Until a token of the new version comes; the whole would take many seconds."""
            async with aclosing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    spans.extend(chunk.version_spans)
                    begun.set()
                    if spans[-1].version == 1:
                        return

        reading = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 60.0)
        report = await publisher.publish(1, hf_state(trained))
        second = await client.activate_version(run_id="run", version=1, prepare_deadline_s=10.0)
        await asyncio.wait_for(reading, 60.0)

        assert second.engines[0].applied.requests_kept == 1
        assert second.engines[0].applied.pause_s > 0
        assert await engine.weights_root() == report.root == engine.root
        assert [span.version for span in spans] == sorted(span.version for span in spans)
        assert {span.version for span in spans} == {0, 1}
        live = hf_state(served)
        assert all(torch.equal(live[name], tensor) for name, tensor in hf_state(trained).items())
    finally:
        await engine.close()
