"""Deltas by broadcast, over gloo: real hub, real engines; bit-exact, or in full, or pulled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import polling
from broadcasting_trainer import DEADLINE_S, SHORT_S, Trainer, trainer
from meshrl.client import WeightSyncClient
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.models.state import hf_state
from meshrl.versions.deltas import rule
from meshrl.versions.transports.base import Answer
from meshrl.versions.transports.shares import SetBase
from meshrl.versions.uploads import Peers, Uploader
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest, Transport, VersionKind, capabilities
from sender_ranks import TwoRanks
from served_engine import ServedEngine, activate, serving_engine

FULL, DELTA = VersionKind.FULL, VersionKind.DELTA
FEW = 0.01
ANCHOR_EVERY = 6


class Deaf(EmbeddedEngine):
    """Joins groups and takes versions in full, but no byte of a delta."""

    is_receiving = False

    async def receive(self, manifest: Manifest) -> None:
        if manifest.kind is DELTA:
            self.is_receiving = True
            await asyncio.sleep(3600)
        await super().receive(manifest)


class Unable(EmbeddedEngine):
    """Takes deltas, and finds out that it cannot apply them."""

    async def receive(self, manifest: Manifest) -> None:
        await super().receive(manifest)
        if manifest.kind is DELTA:
            raise MeshError(Reason.NOT_SUPPORTED, "elements of 8 bytes are not changed in place")


class Older(EmbeddedEngine):
    """Takes no deltas by broadcast, as those of an older release."""

    receives_deltas = False


async def step(training: Trainer, hub: str, version: int, *served: ServedEngine, changed: float = FEW) -> VersionKind:
    """A version that every engine serves to the bit; how it went."""
    report = await training.publish(version, changed=changed)
    activation, manifest = await activate(hub, version)
    assert {each.applied.root for each in activation.engines} == {manifest.result_root}
    assert [each.engine.version for each in served if not training.is_served_by(each)] == []
    assert manifest.transport is Transport.NCCL
    assert report.num_bytes == manifest.payload_bytes
    assert (report.num_bytes < manifest.num_bytes / 4) == (manifest.kind is DELTA)
    return manifest.kind


async def test_twenty_versions_as_deltas_anchors_and_one_dense_one_are_served_to_the_bit(model: str, hub: str) -> None:
    async with (
        serving_engine(model, hub, "e0") as first,
        serving_engine(model, hub, "e1") as second,
        trainer(model, hub, anchor_every=ANCHOR_EVERY) as training,
    ):
        kinds = [
            await step(training, hub, version, first, second, changed=1.0 if version == 10 else FEW)
            for version in range(21)
        ]
    in_full = [version for version, kind in enumerate(kinds) if kind is FULL]
    assert in_full == [0, 7, 10, 17]  # the first, two anchors, the dense one


async def test_engine_that_starts_again_without_the_base_gets_the_version_in_full_and_the_next_as_a_delta(
    model: str, hub: str
) -> None:
    async with (
        serving_engine(model, hub, "e0") as stays,
        trainer(model, hub, anchor_every=64) as training,
    ):
        async with serving_engine(model, hub, "e1") as killed:
            assert [await step(training, hub, version, stays, killed) for version in (0, 1)] == [FULL, DELTA]
            await killed.kill()
        await training.transport._end_late()  # the next version comes before any copy
        async with serving_engine(model, hub, "e1") as again:
            async with WeightSyncClient(hub) as client, asyncio.timeout(60.0):
                while [e.serving_version for e in await client.list_engines() if e.engine_id == "e1"] != [None]:  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.05)
            kinds = [await step(training, hub, version, stays, again) for version in (2, 3)]
            assert kinds == [FULL, DELTA]


async def test_engine_that_comes_late_pulls_the_delta_s_version_and_takes_the_next_delta(model: str, hub: str) -> None:
    async with serving_engine(model, hub, "e0") as first, trainer(model, hub, anchor_every=64) as training:
        assert [await step(training, hub, version, first) for version in (0, 1)] == [FULL, DELTA]
        async with serving_engine(model, hub, "late") as late:
            await polling.until(lambda: late.engine.version == 1)
            assert training.is_served_by(late)
            async with WeightSyncClient(hub) as client:
                (copy,) = (await client.find_version("main", 1)).steps
            assert (copy.kind, copy.transport) == (FULL, Transport.STREAM)
            assert await step(training, hub, 2, first, late) is DELTA


async def test_engine_killed_in_the_middle_of_a_delta_tears_no_other(model: str, hub: str) -> None:
    async with (
        serving_engine(model, hub, "good") as good,
        serving_engine(model, hub, "dies", Deaf) as dies,
        trainer(model, hub, anchor_every=64, deadline_s=SHORT_S) as training,
    ):
        assert await step(training, hub, 0, good, dies) is FULL
        before = {name: tensor.clone() for name, tensor in hf_state(dies.model).items()}
        publishing = asyncio.create_task(training.publish(1, changed=FEW))
        await polling.until(lambda: dies.engine.is_receiving)
        await dies.kill()
        await asyncio.wait_for(publishing, 60.0)
        _, manifest = await activate(hub, 1, min_ready=1)
        assert manifest.kind is DELTA
        assert training.is_served_by(good)
        assert all(torch.equal(tensor, before[name]) for name, tensor in hf_state(dies.model).items())
        await training.publish(2, changed=FEW)
        await activate(hub, 2, min_ready=1)
        assert training.is_served_by(good)


async def test_weights_that_are_not_the_base_refuse_the_delta_and_the_version_is_pulled(model: str, hub: str) -> None:
    async with (
        serving_engine(model, hub, "good") as good,
        serving_engine(model, hub, "flipped") as flipped,
        trainer(model, hub, anchor_every=64) as training,
    ):
        assert await step(training, hub, 0, good, flipped) is FULL
        next(iter(hf_state(flipped.model).values())).view(-1)[3] += 1.0
        await training.publish(1, changed=FEW)
        _, manifest = await activate(hub, 1, min_ready=1)
        assert manifest.kind is DELTA
        assert training.is_served_by(good)
        await polling.until(lambda: flipped.engine.version == 1)
        assert training.is_served_by(flipped)
        assert await step(training, hub, 2, good, flipped) is DELTA


async def test_engine_that_cannot_apply_a_delta_pulls_the_version_and_says_so_to_the_hub(
    model: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving_engine(model, hub, "good") as good,
        serving_engine(model, hub, "unable", Unable) as unable,
        trainer(model, hub, anchor_every=64) as training,
    ):
        assert await step(training, hub, 0, good, unable) is FULL
        await training.publish(1, changed=FEW)
        _, manifest = await activate(hub, 1, min_ready=1)
        assert manifest.kind is DELTA
        await polling.until(lambda: unable.engine.version == 1)
        assert training.is_served_by(unable)
        async with WeightSyncClient(hub) as client, asyncio.timeout(60.0):

            async def listed() -> dict[str, bool]:
                engines = await client.list_engines()
                return {each.engine_id: capabilities.BROADCAST_DELTAS in each.capabilities for each in engines}

            while await listed() != {"good": True, "unable": False}:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.1)
        assert [await step(training, hub, version, good, unable) for version in (2, 3)] == [FULL, FULL]


@pytest.mark.parametrize("without", ["engine", "hub", "slow_link"])
async def test_versions_go_in_full_where_a_delta_is_not_taken_or_not_faster(
    model: str, hub: str, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "hub":
        peers = Uploader.peers

        async def older(uploader: Uploader) -> Peers:
            found = await peers(uploader)
            return Peers(hub={*found.hub} - {capabilities.BROADCAST_DELTAS}, engines=found.engines)

        monkeypatch.setattr(Uploader, "peers", older)
    if without == "slow_link":
        monkeypatch.setattr(rule, "FAST_LINK", 1.0)
    kind = Older if without == "engine" else EmbeddedEngine
    async with (
        serving_engine(model, hub, "e0", kind) as served,
        trainer(model, hub, anchor_every=64) as training,
    ):
        assert [await step(training, hub, version, served) for version in range(3)] == [FULL] * 3


async def test_deltas_that_take_longer_are_left_out_and_one_is_tried_again_later(
    model: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "LOSES_BY_S", -3600.0)
    async with serving_engine(model, hub) as served, trainer(model, hub, anchor_every=3) as training:
        kinds = [await step(training, hub, version, served) for version in range(9)]
    assert kinds == [FULL, DELTA, DELTA, FULL, FULL, FULL, DELTA, FULL, FULL]


async def test_version_that_a_rank_did_not_keep_is_published_and_the_next_one_leaves_in_full(
    model: str, hub: str
) -> None:
    async with serving_engine(model, hub) as served, trainer(model, hub, anchor_every=64) as training:
        carry_out, failures = training.share.carry_out, [1]

        def fails_once(call: Any) -> Answer:
            if isinstance(call, SetBase) and call.version in failures:
                raise MeshError(Reason.DEADLINE_PASSED, "this rank has no version 1")
            return carry_out(call)

        training.share.carry_out = fails_once  # type: ignore[method-assign]  # a rank that is late
        kinds = [await step(training, hub, version, served) for version in range(4)]
        assert kinds == [FULL, DELTA, FULL, DELTA]


async def test_version_that_is_prepared_again_is_the_same_and_one_that_was_captured_anew_is_not(
    model: str, hub: str
) -> None:
    async with serving_engine(model, hub) as served, trainer(model, hub, anchor_every=64) as training:
        assert await step(training, hub, 0, served) is FULL
        captured = training.snapshotter.capture(1)
        first = await training.transport.prepare(1, captured)
        again = await training.transport.prepare(1, captured)
        assert again.manifest is first.manifest
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter += 1.0
        anew = await training.transport.prepare(1, training.snapshotter.capture(1))
        assert anew.manifest.result_root != first.manifest.result_root


async def test_two_ranks_broadcast_the_deltas_of_their_rows(model: str, hub: str) -> None:
    weights: dict[str, Any] = dict(hf_state(AutoModelForCausalLM.from_pretrained(model)))
    async with WeightSyncClient(hub) as client, serving_engine(model, hub) as served:
        ranks = TwoRanks(weights, client, run_id="main", bucket_bytes=2048, deadline_s=DEADLINE_S, anchor_every=64)
        kinds = []
        for version in range(4):
            generator = torch.Generator().manual_seed(version)
            weights = {
                name: tensor + 0.01 * (torch.rand(tensor.shape, generator=generator) < FEW)
                for name, tensor in weights.items()
            }
            await ranks.publish(version, weights)
            _, manifest = await activate(hub, version)
            assert all(torch.equal(tensor, weights[name]) for name, tensor in hf_state(served.model).items())
            kinds.append(manifest.kind)
        assert kinds == [FULL, DELTA, DELTA, DELTA]
        assert [chunk.offset for chunk in manifest.chunks] == [0, manifest.chunks[0].length]
        await ranks.close()
