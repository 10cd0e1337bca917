"""Engines behind a relay, with certificates at both ends of every connection: what they fetch leaves the hub once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpc_servers import served
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles, Credentials, credentials_of
from meshrl.client.trust import Role
from meshrl.models.state import hf_state
from meshrl.versions.sources import LinkLimits
from meshrl.weights.config import WeightsConfig
from meshrl.weights.main import build_hub
from meshrl.weights.relay import Relay
from meshrl.weights.service import RelayService, WeightSyncService
from meshrl.wire import frames
from meshrl.wire.types import Transport, VersionKind
from served_engine import serving_engine
from state_publisher import StatePublisher

pytestmark = pytest.mark.timeout(240)


class CountedFetches(WeightSyncService):
    """A hub's service that counts the bytes of versions that leave it."""

    sent = 0

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802 (an RPC)
        async for message in super().Fetch(request, context):
            chunk = frames.parse_fetch(message)
            self.sent += len(chunk.data)
            yield message


def stepped(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after a step that moved every hundredth of them by one unit in the last place."""
    moved = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in moved.values():
        tensor.view(torch.int32).view(-1)[::100] += 1
    return moved


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def listen(stack: AsyncExitStack, service: WeightSyncService | RelayService, credentials: Credentials) -> str:
    """Serves it; returns the address."""
    serving = served(frames.SERVICE, frames.add_weight_sync, service, credentials=credentials)
    return await stack.enter_async_context(serving)


async def test_deltas_reach_engines_through_a_relay_to_the_bit_with_certificates(
    model: str, tmp_path: Path, stack: AsyncExitStack
) -> None:
    authority = Authority.create(tmp_path / "credentials", "main")

    def member(role: Role, name: str) -> Credentials:
        authority.issue(tmp_path / name, role, name)
        return credentials_of(CredentialFiles.of_folder(tmp_path / name))

    def client(role: Role, name: str) -> WeightSyncClient:
        return WeightSyncClient(address, ChannelOptions(credentials=member(role, name)))

    hub = build_hub(WeightsConfig(output_dir=tmp_path / "run"))
    await hub.start()
    stack.push_async_callback(hub.stop)
    service = CountedFetches(hub)
    address = await listen(stack, service, member(Role.HUB, "hub"))
    stack.callback(hub.close_streams)
    upstream = await stack.enter_async_context(client(Role.RELAY, "relay"))
    relay = Relay(upstream, LinkLimits(), spool_dir=tmp_path / "site", max_chunk_bytes=2**20, keep_versions=2)
    await relay.start()
    relayed = await listen(stack, RelayService(relay, address), member(Role.RELAY, "relay-server"))
    stack.push_async_callback(relay.stop)

    publishing = await stack.enter_async_context(client(Role.PUBLISHER, "trainer"))
    deciding = await stack.enter_async_context(client(Role.ORCHESTRATOR, "orchestrator"))
    publisher = StatePublisher(publishing, Transport.STREAM, tmp_path, run_id="main", anchor_every=64)
    stack.push_async_callback(publisher.close)
    engines = [
        await stack.enter_async_context(
            serving_engine(model, address, name, credentials=member(Role.AGENT, name), relays=[relayed])
        )
        for name in ("e0", "e1")
    ]
    state = {name: tensor.clone() for name, tensor in hf_state(AutoModelForCausalLM.from_pretrained(model)).items()}
    kinds, num_bytes = [], 0
    for version in range(3):
        state = stepped(state)
        num_bytes += (await publisher.publish(version, state)).num_bytes
        await deciding.activate_version(run_id="main", version=version, min_ready=2, prepare_deadline_s=60.0)
        kinds.append((await publishing.get_manifest("main", version))[0].kind)
        for engine in engines:
            live = hf_state(engine.model)
            assert [name for name in state if not torch.equal(live[name], state[name])] == []
    assert kinds == [VersionKind.FULL, VersionKind.DELTA, VersionKind.DELTA]
    assert service.sent == num_bytes  # two engines, and each byte left the hub once
