"""The nccl transport when engines or the trainer come, go and break, over gloo: real hub, real engines."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import polling
from broadcasting_trainer import DEADLINE_S, SHORT_S, trainer
from meshrl.client import WeightSyncClient
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.models.state import hf_state
from meshrl.versions.collective.broadcasting import Receiver
from meshrl.versions.progress import Progress
from meshrl.versions.transports.base import Answer
from meshrl.versions.transports.broadcast import MeetEngines, SendVersion
from meshrl.versions.uploads import Peers, Uploader
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentState, JoinGroup, Manifest, Transport, capabilities
from sender_ranks import TwoRanks
from served_engine import activate, serving_engine


async def groups(hub: str) -> dict[str, int | None]:
    async with WeightSyncClient(hub) as client:
        return {engine.engine_id: engine.group_generation for engine in await client.list_engines()}


async def is_prepared(hub: str, engine_id: str) -> bool:
    async with WeightSyncClient(hub) as client:
        states = {engine.engine_id: engine.state for engine in await client.list_engines()}
    return states.get(engine_id) is AgentState.PREPARED


class Frozen(EmbeddedEngine):
    """Joins groups but never takes a byte."""

    is_receiving = False

    async def receive(self, manifest: Manifest) -> None:
        self.is_receiving = True
        await asyncio.sleep(3600)


class Absent(EmbeddedEngine):
    """Says that it brings a rank, and never comes."""

    async def join_group(self, group: JoinGroup) -> None:
        await asyncio.sleep(3600)


async def test_engine_that_comes_late_gets_the_newest_version_and_is_in_the_next_group(model: str, hub: str) -> None:
    async with serving_engine(model, hub, "e0") as first, trainer(model, hub) as training:
        report = await training.publish(0)
        assert report.parts_s["wire"] > 0
        assert set(report.parts_s) == {"snapshot", "group", "encode", "stage", "seal", "wire"}
        await activate(hub, 0)
        async with serving_engine(model, hub, "late") as late:
            await polling.until(lambda: late.engine.version == 0)
            assert training.is_served_by(late)
            assert await groups(hub) == {"e0": 1, "late": None}  # it has pulled the version
            await training.publish(1)
            activation, _ = await activate(hub, 1)
            assert {report.engine_id for report in activation.engines} == {"e0", "late"}
            assert training.is_served_by(first)
            assert training.is_served_by(late)


async def test_every_part_of_a_broadcast_is_progress(model: str, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[float] = []
    monkeypatch.setattr(Progress, "moved", lambda _, *, unseen_s=0.0: moves.append(unseen_s))
    async with serving_engine(model, hub, "e0"), trainer(model, hub) as training:
        await training.publish(0)
        snapshot = training.share.held.get(0, deadline_s=30.0)
        assert len(moves) > len(snapshot.plan.buckets) > 5


async def test_trainer_without_engines_publishes_and_the_first_engine_gets_the_version(model: str, hub: str) -> None:
    async with trainer(model, hub) as training:
        await training.publish(0)
        await training.publish(1)
        async with serving_engine(model, hub) as served:
            activation, _ = await activate(hub, 1)
            assert [report.engine_id for report in activation.engines] == ["e0"]
            assert training.is_served_by(served)


async def test_engine_of_another_layout_is_refused_before_anything_is_sent(
    model: str, hub: str, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(model)
    other.resize_token_embeddings(other.config.vocab_size + 8)
    other.save_pretrained(tmp_path / "other")
    async with serving_engine(str(tmp_path / "other"), hub, "misfit"), trainer(model, hub) as training:
        await training.publish(0)
        with pytest.raises(MeshError, match=r"model\.embed_tokens\.weight is float32 \(\d+, 16\)") as refused:
            await activate(hub, 0)
        assert refused.value.metadata == {"misfit": "LAYOUT_MISMATCH"}
        async with serving_engine(model, hub, "e0") as served:
            await polling.until(lambda: is_prepared(hub, "e0"))  # by a copy of version 0
            assert await training.transport._lacking(1) == ["e0"]  # as if a group had met without it meanwhile
            await training.publish(1)
            with pytest.raises(MeshError, match="LAYOUT_MISMATCH"):
                await activate(hub, 1)  # of all, and one will never have it
            await activate(hub, 1, min_ready=1)
            assert training.is_served_by(served)
            assert await groups(hub) == {"misfit": None, "e0": 1}  # the first group was the only one


async def test_versions_go_on_while_an_engine_stays_stuck(model: str, hub: str) -> None:
    """It breaks the broadcast of one version, whose copy the other engine pulls, and is asked into no further group."""
    async with (
        serving_engine(model, hub, "good") as good,
        serving_engine(model, hub, "stuck", Frozen),
        trainer(model, hub, deadline_s=SHORT_S) as training,
    ):
        await training.publish(0)
        await activate(hub, 0, min_ready=1)
        assert training.is_served_by(good)
        for version in (1, 2):
            await training.publish(version)
            assert training.transport._took == {"good"}, version
            await activate(hub, version, min_ready=1)
            assert training.is_served_by(good)


async def test_engine_that_does_not_come_to_the_group_is_left_out(model: str, hub: str) -> None:
    async with (
        serving_engine(model, hub, "good") as good,
        serving_engine(model, hub, "away", Absent) as away,
        trainer(model, hub, deadline_s=SHORT_S) as training,
    ):
        await training.publish(0)
        await away.kill()
        activation, _ = await activate(hub, 0)
        assert [report.engine_id for report in activation.engines] == ["good"]
        assert training.is_served_by(good)


async def test_engine_killed_while_it_receives_does_not_stop_the_trainer(model: str, hub: str) -> None:
    async with (
        serving_engine(model, hub, "good") as good,
        serving_engine(model, hub, "dies", Frozen) as dies,
        trainer(model, hub, deadline_s=SHORT_S) as training,
    ):
        publishing = asyncio.create_task(training.publish(0))
        await polling.until(lambda: dies.engine.is_receiving)
        await dies.kill()
        await asyncio.wait_for(publishing, 60.0)
        await activate(hub, 0, min_ready=1)
        assert training.is_served_by(good)
        await training.publish(1)
        await activate(hub, 1, min_ready=1)
        assert training.is_served_by(good)


async def test_trainer_that_dies_in_a_broadcast_leaves_the_engine_on_its_version(model: str, hub: str) -> None:
    async with serving_engine(model, hub) as served:
        async with trainer(model, hub) as training:
            await training.publish(0)
            await activate(hub, 0)
            before = {name: tensor.clone() for name, tensor in hf_state(served.model).items()}
            share = training.share
            carry_out = share.carry_out

            def dies(call: MeetEngines | SendVersion) -> Answer:
                if isinstance(call, SendVersion):
                    share.leave()
                    raise MeshError(Reason.INTERNAL, "killed")
                return carry_out(call)

            share.carry_out = dies  # type: ignore[method-assign]  # the death of a process
            with pytest.raises(MeshError, match="killed"):
                await training.publish(1)
        live = hf_state(served.model)
        assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
        async with trainer(model, hub, epoch=2) as restarted:
            await restarted.publish(1)
            activation, manifest = await activate(hub, 1)
            assert (manifest.epoch, activation.engines[0].applied.root) == (2, manifest.result_root)
            assert restarted.is_served_by(served)


async def test_snapshot_outlives_the_next_steps(model: str, hub: str) -> None:
    async with serving_engine(model, hub) as served, trainer(model, hub) as training:
        captured = training.snapshotter.capture(0)
        expected = {name: tensor.clone() for name, tensor in hf_state(training.model).items()}
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.zero_()
        await training.publisher.publish(0, captured)
        await activate(hub, 0)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in hf_state(served.model).items())


async def test_hub_that_takes_no_copies_is_sent_none_and_the_next_broadcast_reaches_late_engines(
    model: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def of_1_0(uploader: Uploader) -> Peers:
        return Peers(hub=())

    monkeypatch.setattr(Uploader, "peers", of_1_0)
    async with trainer(model, hub) as training:
        await training.publish(0)
        async with serving_engine(model, hub) as served:
            assert training.transport._late is not None
            await asyncio.wait({training.transport._late}, timeout=60.0)
            async with WeightSyncClient(hub) as client:
                assert (await client.find_version("main", 0)).steps == ()
            await training.publish(1)
            await activate(hub, 1)
            assert training.is_served_by(served)


async def test_hub_that_would_drop_the_order_of_rows_is_refused_before_a_group_opens(
    model: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def all_but_rows(uploader: Uploader) -> Peers:
        return Peers(hub={*capabilities.HUB} - {capabilities.ROW_ORDER})

    async with trainer(model, hub) as training, serving_engine(model, hub):
        plan = training.snapshotter.plan
        ordered = replace(plan.collective, reordered_tensors=(0,), row_order=(0,))
        monkeypatch.setattr(training.transport, "_plan", replace(plan, collective=ordered))
        with monkeypatch.context() as older:
            older.setattr(Uploader, "peers", all_but_rows)
            with pytest.raises(MeshError, match=r"lacks the capability broadcasts\.rows; start it from") as refused:
                await training.publish(0)
        assert refused.value.reason is Reason.NOT_SUPPORTED
        assert await groups(hub) == {"e0": None}
        await training.publish(0)
        assert await groups(hub) == {"e0": 1}


async def test_late_engine_pulls_what_two_ranks_hold(model: str, hub: str) -> None:
    weights = hf_state(AutoModelForCausalLM.from_pretrained(model))
    async with WeightSyncClient(hub) as client:
        ranks = TwoRanks(weights, client, run_id="main", bucket_bytes=2048, deadline_s=DEADLINE_S)
        await ranks.publish(0, weights)
        async with serving_engine(model, hub) as served:
            activation, manifest = await activate(hub, 0)
            assert activation.engines[0].applied.root == manifest.result_root
            assert all(torch.equal(tensor, weights[name]) for name, tensor in hf_state(served.model).items())
            found = await client.find_version("main", 0)
            assert [(step.transport, step.result_root) for step in found.steps] == [
                (Transport.STREAM, manifest.result_root)
            ]
        await ranks.close()


async def test_copy_under_way_over_several_ranks_ends_when_the_next_version_comes(
    model: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"layer.{number}": torch.randn(2**20) for number in range(32)}
    copying = threading.Event()
    assemble = Receiver._assemble

    def slowly(self: Receiver, *parts: Any) -> Any:
        copying.set()
        time.sleep(1.0)  # of each of 32 buckets, which are more than the sockets between hold
        return assemble(self, *parts)

    monkeypatch.setattr(Receiver, "_assemble", slowly)
    async with WeightSyncClient(hub) as client:
        ranks = TwoRanks(weights, client, run_id="main", bucket_bytes=2**22, deadline_s=SHORT_S)
        await ranks.publish(0, weights)
        assert ranks.transport._made is not None
        assert ranks.transport._late is not None
        ranks.transport._late.cancel()  # it finds no engine that lacks the version
        ranks.transport._late = asyncio.create_task(ranks.transport._copy(ranks.transport._made.manifest))
        assert await asyncio.to_thread(copying.wait, 30.0)
        async with asyncio.timeout(20.0):
            await ranks.publish(1, weights)
            await ranks.transport._in_thread(lambda: None)  # the thread that calls the ranks is free
        await ranks.close()


async def test_defect_in_looking_for_late_engines_is_heard_at_the_next_version(
    model: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainer(model, hub) as training:

        async def broken(version: int) -> list[str]:
            raise RuntimeError("a defect")

        monkeypatch.setattr(training.transport, "_lacking", broken)
        await training.publish(0)
        async with asyncio.timeout(60):
            await asyncio.wait({training.transport._late})
        with pytest.raises(RuntimeError, match="a defect"):
            await training.publish(1)
