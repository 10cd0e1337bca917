"""New weights through a real hub: they are the ones that were published, and every token says which version made it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch

from engine_mesh import EngineClient, EngineMesh, reference
from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import ActivationPolicy, Transport
from plain_checks import check_greedy
from plain_model import logits_across, logits_of, plain_model, plain_state
from state_publisher import StatePublisher

PROMPT = [1, 2, 3]
LONG_PROMPT = [1 + index % 63 for index in range(400)]  # several blocks of any prefix cache
LENGTH = 480


async def test_after_an_update_the_engine_is_the_plain_model_of_the_new_weights(
    mesh: EngineMesh, client: EngineClient
) -> None:
    """Whose bytes do not depend on the transport."""
    roots: dict[int, set[str]] = {0: set(), 1: set()}
    for transport in (Transport.FILESYSTEM, Transport.STREAM, Transport.STREAM, Transport.FILESYSTEM):
        before, seed = await client.greedy(PROMPT), mesh.other_seed()
        activation = await mesh.publish(seed, transport=transport)
        assert [engine.applied.version for engine in activation.engines] == [mesh.version]
        version = await client.version()
        assert (version["version"], version["paused"], len(version["root"])) == (mesh.version, False, 64)
        roots[seed].add(version["root"])
        choice = await client.greedy(PROMPT)
        assert choice["version_spans"] == [[0, 40, mesh.version]]
        assert choice["weight_versions"] == [{"version": mesh.version, "start": 0, "end": 40}]
        assert choice["token_ids"] != before["token_ids"]
        check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)
        answer = await client.post(
            "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
        )
        assert answer.headers["X-Policy-Version"] == str(mesh.version)
    assert [len(found) for found in roots.values()] == [1, 1]


@pytest.mark.parametrize("transport", [Transport.FILESYSTEM, Transport.STREAM], ids=lambda each: each.value)
async def test_after_a_delta_the_engine_is_the_plain_model_of_the_new_weights(
    mesh: EngineMesh, client: EngineClient, transport: Transport
) -> None:
    seed = mesh.other_seed()
    new = plain_state(seed, mesh.kind.dtype)
    old = {name: torch.where(torch.rand(t.shape) < 0.03, t * 1.25, t) for name, t in new.items()}
    async with WeightSyncClient(mesh.hub_address) as hub:
        publisher = StatePublisher(hub, transport, mesh.folder / "broadcasts", num_threads=3, anchor_every=9)
        sizes = []
        for state in (old, new, old, new):
            mesh.version += 1
            sizes.append((await publisher.publish(mesh.version, state)).num_bytes)
            await mesh.activate(None, hub=hub)
        await publisher.close()
    mesh.seed = seed
    assert max(sizes[1:]) < sizes[0] / 4
    choice = await client.greedy(PROMPT)
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)


async def test_a_prompt_that_was_cached_is_read_anew_by_new_weights(mesh: EngineMesh, client: EngineClient) -> None:
    for _ in range(2):  # the second one finds the first one's prefix
        choice = await client.greedy(LONG_PROMPT)
        check_greedy(mesh.kind, logits_of(reference(mesh), LONG_PROMPT, choice["token_ids"]), choice)
    await mesh.publish(mesh.other_seed())
    choice = await client.greedy(LONG_PROMPT)
    check_greedy(mesh.kind, logits_of(reference(mesh), LONG_PROMPT, choice["token_ids"]), choice)


async def test_request_that_comes_in_the_pause_reads_nothing_that_older_weights_cached(
    mesh: EngineMesh, client: EngineClient
) -> None:
    await client.greedy(LONG_PROMPT)
    assert (await client.post("/pause")).status == 200
    waiting = asyncio.create_task(client.greedy(LONG_PROMPT))
    await client.until_in_flight(1)
    await mesh.publish(mesh.other_seed())
    await client.post("/resume")
    choice = await waiting
    assert choice["version_spans"] == [[0, 40, mesh.version]]
    assert choice["prompt_version"] == mesh.version
    check_greedy(mesh.kind, logits_of(reference(mesh), LONG_PROMPT, choice["token_ids"]), choice)


@pytest.mark.parametrize("policy", [ActivationPolicy.ROLLING, ActivationPolicy.GANG], ids=lambda each: each.value)
async def test_a_request_in_flight_goes_on_under_the_new_version(
    mesh: EngineMesh, client: EngineClient, policy: ActivationPolicy
) -> None:
    prompts = [PROMPT, [4, 5], [6] * 30]
    assert mesh.seed is not None
    old, old_seed = mesh.version, mesh.seed
    running = await client.catch(*(partial(client.greedy, prompt, LENGTH) for prompt in prompts))
    activation = await mesh.publish(mesh.other_seed(), policy=policy)
    assert activation.engines[0].applied.requests_kept == len(prompts)
    assert 0.0 < activation.engines[0].applied.pause_s < 60.0
    for prompt, choice in zip(prompts, await asyncio.gather(*running), strict=True):
        (start, boundary, first), (again, end, second) = choice["version_spans"]
        assert (start, again, end) == (0, boundary, LENGTH)
        assert (first, second) == (old, mesh.version)
        assert 0 < boundary < LENGTH
        # Were the boundary one token off on either side, these would be other logits.
        logits = logits_across(plain_model(old_seed), reference(mesh), prompt, choice["token_ids"], boundary)
        check_greedy(mesh.kind, logits, choice)


async def test_spans_cover_every_token_over_several_versions(mesh: EngineMesh, client: EngineClient) -> None:
    first = mesh.version
    running = await client.begin(*(client.one([1, 2], max_tokens=LENGTH, seed=seed) for seed in range(4)))
    await client.one(PROMPT, max_tokens=3)  # came last: by now those before it have tokens
    for _ in range(2):
        await mesh.publish(mesh.other_seed())
    for task in running:
        spans = (await task)["version_spans"]
        assert [start for start, *_ in spans] == [0, *(end for _, end, _ in spans[:-1])]
        assert spans[-1][1] == LENGTH
        assert [version for *_, version in spans] == [first, first + 1, first + 2][: len(spans)]


async def test_the_same_weights_under_a_new_name_change_the_name_alone(mesh: EngineMesh, client: EngineClient) -> None:
    assert mesh.seed is not None
    before, root = await client.greedy(PROMPT), (await client.version())["root"]
    activation = await mesh.publish(mesh.seed)
    assert activation.engines[0].applied.pause_s == 0.0
    after, version = await client.greedy(PROMPT), await client.version()
    assert after["token_ids"] == before["token_ids"]
    assert after["version_spans"] == [[0, 40, mesh.version]]
    assert (version["version"], version["root"]) == (mesh.version, root)


async def test_weights_of_another_layout_are_refused_and_the_live_ones_stay(
    mesh: EngineMesh, client: EngineClient
) -> None:
    seed, version = mesh.seed, mesh.version
    state = plain_state(0, mesh.kind.dtype)
    name = next(name for name in state if name.endswith("up_proj.weight"))
    state[name] = torch.zeros(5, 64, dtype=mesh.kind.dtype)
    with pytest.raises(MeshError, match="LAYOUT_MISMATCH") as refused:
        await mesh.publish_state(state)
    assert refused.value.reason is Reason.ENGINES_NOT_READY
    assert name in refused.value.message
    assert seed is not None
    assert (await client.version())["version"] == version
    choice = await client.greedy(PROMPT)
    check_greedy(mesh.kind, logits_of(plain_model(seed), PROMPT, choice["token_ids"]), choice)
