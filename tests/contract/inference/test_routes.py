"""What an engine tells about itself, on the routes that probes and pools read."""

from __future__ import annotations

from engine_mesh import MAX_MODEL_LEN, MODEL_NAME, SLOTS, EngineClient, EngineMesh


async def test_health_is_ok_with_requests_in_flight_and_while_paused(client: EngineClient) -> None:
    for path in ("/health", "/ping"):
        answer = await client.get(path)
        assert (answer.status, answer.body) == (200, {"status": "ok"})
    (running,) = await client.begin(client.greedy([1, 2], 2000))
    assert (await client.get("/health")).status == 200
    await client.post("/pause")
    assert (await client.get("/health")).status == 200
    await client.post("/resume")
    running.cancel()
    await client.until_in_flight(0)


async def test_version_says_what_is_served(mesh: EngineMesh, client: EngineClient) -> None:
    version = await client.version()
    assert len(bytes.fromhex(version.pop("root"))) == 32
    assert version.pop("kv_tokens") >= MAX_MODEL_LEN  # else not one request of full length would fit
    assert version == {
        "runs": {},
        "version": mesh.version, "paused": False, "in_flight": 0, "logprobs_mode": "processed_logprobs",
        "slots": SLOTS, "waiting": 0, "preempted": 0, "hub": mesh.hub_address, "hub_is_there": True,
    }  # fmt: skip


async def test_the_model_is_listed_with_its_context_length(client: EngineClient) -> None:
    listed = (await client.get("/v1/models")).body
    assert listed["object"] == "list"
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [(MODEL_NAME, MAX_MODEL_LEN)]


async def test_metrics_count_requests_and_tokens(mesh: EngineMesh, client: EngineClient) -> None:
    before = await client.metrics()
    await client.generate([1, 2, 3], n=2, max_tokens=10)
    after = await client.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["meshrl_engine_generated_tokens_total"] == 20
    assert grown["meshrl_engine_finished_requests_total"] == 2
    assert after["meshrl_engine_requests_running"] == after["meshrl_engine_requests_waiting"] == 0
    assert after["meshrl_engine_slots"] == SLOTS
    assert after["meshrl_engine_policy_version"] == mesh.version
