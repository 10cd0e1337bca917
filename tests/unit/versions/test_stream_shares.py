"""Versions that sender ranks stream, or write to files, from their own rows: to the bit what one rank makes of all
weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.plan import PublishPlan, rows_of
from meshrl.versions.deltas.image import WeightImage
from meshrl.versions.files import HostBytes, map_files
from meshrl.versions.snapshot import Captured, take_snapshot, whole_snapshot
from meshrl.versions.transports.base import Answer, Prepared, VersionLine
from meshrl.versions.transports.filesystem import FileShare, FilesystemTransport
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.versions.transports.stream import StreamShare, StreamTransport
from meshrl.wire.types import CollectivePlan, VersionKind

State = dict[str, torch.Tensor]
STREAM, FILES = (StreamShare, StreamTransport), (FileShare, FilesystemTransport)
LINE = VersionLine(run_id="run", epoch=1)
WHOLE = ("experts", "steps")


def state_of(seed: int) -> State:
    """Weights of many types; the rows of some do not divide by two, and one has fewer rows than there are ranks."""
    source = torch.Generator().manual_seed(seed)
    made = {
        "embed": torch.randn((701, 33), generator=source).bfloat16(),
        "layer": torch.randn((64, 128), generator=source).bfloat16(),
        "norm": torch.randn((1, 7), generator=source).bfloat16(),
        "scale": torch.randn(9, generator=source),
        "empty": torch.zeros((0, 4)),
    }
    experts = torch.randn((3, 5), generator=source).to(torch.float8_e4m3fn)
    return {**made, "experts": experts, "steps": torch.tensor([seed, 7])}


def stepped(state: Mapping[str, torch.Tensor], seed: int, *, share: float = 0.02) -> State:
    """The weights once `share` of them have changed in a bit or two."""
    source = np.random.default_rng(seed)
    moved = dict(state)
    for name in sorted(state.keys() - {"empty"}):
        tensor = state[name]
        data = tensor.reshape(-1).view(torch.uint8).numpy().copy()
        hit = source.random(len(data)) < share
        data[hit] ^= source.integers(1, 4, int(hit.sum()), dtype=np.uint8)
        moved[name] = torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)
    return moved


class Ranks:
    """The shares of `count` ranks, and rank 0's transport over them."""

    def __init__(
        self,
        count: int,
        folder: Path,
        *,
        anchor_every: int | None,
        ways: tuple[Any, Any] = (StreamShare, StreamTransport),
    ) -> None:
        share, transport = ways
        self.shares = [share(folder, epoch=1, share=rank, num_shares=count, num_threads=2) for rank in range(count)]
        self.tensors = whole_snapshot(state_of(0)).tensors
        whole = tuple(index for index, entry in enumerate(self.tensors) if entry.name in WHOLE)
        self.plan = CollectivePlan(num_senders=count, bucket_bytes=4096, whole_tensors=whole if count > 1 else ())
        self.transport = transport(
            LINE, self, self.shares[0], num_shares=count, chunk_bytes=4096, anchor_every=anchor_every
        )

    def call(self, call: Any, *, stall_s: float) -> list[Answer]:
        return [share.carry_out(call) for share in self.shares]

    async def prepare(self, version: int, state: State) -> Prepared:
        """Each rank's snapshot of its rows, then what rank 0 makes of them."""
        for rank, share in enumerate(self.shares):
            reuse = share.release_snapshot()
            own = {}
            for name, tensor in state.items():
                first, last = rows_of(len(tensor), rank, len(self.shares))
                own[name] = tensor if name in WHOLE or len(self.shares) == 1 else tensor[first:last]
            snapshot = take_snapshot(
                PublishPlan(tensors=self.tensors, collective=self.plan),
                own,
                rank,
                torch.device("cpu"),
                reuse=reuse,
            )
            share.held.put(version, snapshot)
        return await self.transport.prepare(version, Captured())


def gathering(folder: Path, *, anchor_every: int | None) -> StreamTransport:
    """The transport of a rank 0 that gathers all weights."""
    share = StreamShare(folder / "gathering", epoch=1)
    return StreamTransport(
        LINE, RankCalls(share, None, num_ranks=1), share, chunk_bytes=4096, anchor_every=anchor_every
    )


def bytes_of(made: Prepared) -> Any:
    """What a version brings: from its buffer, or its files."""
    return (
        made.buffer if made.buffer is not None else np.concatenate([p for _, p in map_files(made.manifest.files).parts])
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("ways", [STREAM, FILES])
async def test_the_ranks_deltas_joined_lead_where_one_of_all_weights_leads(
    count: int, ways: tuple[Any, Any], tmp_path: Path
) -> None:
    ranks = Ranks(count, tmp_path / "shm", anchor_every=3, ways=ways)
    gathered = gathering(tmp_path, anchor_every=3)
    state = state_of(0)
    image: WeightImage | None = None
    kinds = []
    try:
        for version in range(6):
            made = await ranks.prepare(version, state)
            expected = await gathered.prepare(version, Captured(gathered=state))
            ours, theirs = made.manifest, expected.manifest
            came = bytes_of(made)
            assert expected.buffer is not None
            assert (ours.kind, ours.result_root, ours.base_root) == (theirs.kind, theirs.result_root, theirs.base_root)
            assert ours.tensors == theirs.tensors
            assert [entry.digest for entry in ours.tensors] == [
                digest_bytes(sum128(state[entry.name])) for entry in ours.tensors
            ]
            if ours.kind is VersionKind.FULL or count == 1:
                assert came.tobytes() == expected.buffer.tobytes()
            if ours.kind is VersionKind.FULL:
                whole = whole_snapshot(state).flat.numpy().tobytes()
                assert came.tobytes() == whole
                if image is not None:
                    image.close()
                image = WeightImage(ours, HostBytes(parts=((0, came.copy()),)))
            else:
                assert image is not None
                image.apply(ours, came)
                assert image.root == theirs.result_root
                assert image.held.parts[0][1].tobytes() == whole_snapshot(state).flat.numpy().tobytes()
            kinds.append(ours.kind)
            assert set(await ranks.transport.deliver(version)) == {"keep"}
            await gathered.deliver(version)
            assert [
                p for p in (tmp_path / "shm").glob("*") if p.is_file()
            ] == []  # nothing lies about between two versions
            state = stepped(state, version)
        delta = VersionKind.DELTA
        assert kinds == [VersionKind.FULL, delta, delta, delta, VersionKind.FULL, delta]
    finally:
        if image is not None:
            image.close()
        await ranks.transport.close()
        await gathered.close()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_delta_that_the_hub_refuses_or_that_does_not_pay_goes_in_full(count: int, tmp_path: Path) -> None:
    ranks = Ranks(count, tmp_path, anchor_every=9)
    try:
        first = await ranks.prepare(0, state_of(0))
        assert (await ranks.transport.prepare(0, Captured())) is first  # the hub was away: nothing is made again
        await ranks.transport.deliver(0)
        state = stepped(state_of(0), 1)
        delta = await ranks.prepare(1, state)
        assert delta.manifest.kind is VersionKind.DELTA
        full = await ranks.transport.prepare(1, Captured())
        assert (full.manifest.kind, full.manifest.result_root) == (VersionKind.FULL, delta.manifest.result_root)
        assert full.buffer is not None
        assert full.buffer.tobytes() == whole_snapshot(state).flat.numpy().tobytes()
        await ranks.transport.deliver(1)
        assert (await ranks.prepare(2, stepped(state, 2))).manifest.kind is VersionKind.DELTA
        await ranks.transport.deliver(2)
        assert (await ranks.prepare(3, state_of(5))).manifest.kind is VersionKind.FULL
        await ranks.transport.deliver(3)
        ranks.shares[-1].base._base = None  # a rank that can make no pieces: a delta without them would lead elsewhere
        assert (await ranks.prepare(4, stepped(state_of(5), 4))).manifest.kind is VersionKind.FULL
    finally:
        await ranks.transport.close()


async def test_without_deltas_a_version_has_the_digests_of_files(tmp_path: Path) -> None:
    ranks, gathered = Ranks(2, tmp_path, anchor_every=None), gathering(tmp_path, anchor_every=None)
    try:
        for version in range(3):
            state = state_of(version)
            made = await ranks.prepare(version, state)
            expected = await gathered.prepare(version, Captured(gathered=state))
            assert made.manifest == expected.manifest
            assert await ranks.transport.deliver(version) == {}
    finally:
        await ranks.transport.close()
        await gathered.close()
