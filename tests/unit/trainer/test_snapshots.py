"""What a rank captures for a version is the published form, whichever transport it leaves by."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from meshrl.trainer.publishing.snapshots import PublicationSettings, Snapshotter, plan_of
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.versions.snapshot import Snapshot, whole_snapshot


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(9))
        self.b = nn.Parameter(torch.randn(6, 5))
        self.register_buffer("n", torch.tensor(3))


def snapshotter(model: nn.Module, transport: str, folder: Path, *, in_shares: bool) -> Snapshotter:
    settings = PublicationSettings(
        transport=transport, epoch=1, adapter_only=False, in_shares=in_shares, folder=str(folder), chunk_bytes=4096,
        bucket_bytes=40, num_threads=1, backend="gloo", deadline_s=1.0,
    )  # fmt: skip
    return Snapshotter(model, torch.bfloat16, RankGroup(), settings)


def bytes_in_stream_order(held: Snapshot) -> bytes:
    assert held.spans == [(tensor.offset, tensor.num_bytes) for tensor in held.tensors]
    return held.flat.numpy().tobytes()


def test_floating_tensors_are_cast_and_others_left() -> None:
    plan = plan_of(Small(), torch.bfloat16)
    assert {tensor.name: tensor.dtype for tensor in plan.tensors} == {"a": "bfloat16", "b": "bfloat16", "n": "int64"}
    assert plan.num_bytes == 2 * 9 + 2 * 30 + 8


def test_every_transport_is_given_the_same_bytes_and_later_steps_change_none(tmp_path: Path) -> None:
    model = Small()
    expected = b"".join(
        tensor.to(torch.bfloat16).view(torch.uint8).numpy().tobytes() if tensor.is_floating_point() else
        tensor.reshape(1).view(torch.uint8).numpy().tobytes()
        for tensor in (model.n, model.a.detach(), model.b.detach().reshape(-1))
    )  # fmt: skip
    gathered = snapshotter(model, "stream", tmp_path, in_shares=False).capture(1).gathered
    assert gathered is not None
    found: list[Snapshot] = []
    for transport in ("filesystem", "nccl"):
        made = snapshotter(model, transport, tmp_path, in_shares=True)
        captured = made.capture(1)
        assert made.share is not None
        assert captured.gathered is None
        found.append(made.share.held.get(1, deadline_s=0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert [bytes_in_stream_order(held) for held in (whole_snapshot(gathered), *found)] == [expected] * 3
