"""Deltas in the parameters of an engine on a GPU: the bits and the digests of a CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.deltas.codec import Rows, encode, write_stream
from meshrl.versions.placement import check_parts
from meshrl.versions.snapshot import whole_snapshot
from meshrl.versions.transports.base import VersionLine
from meshrl.wire.manifest import SUM128
from meshrl.wire.types import Transport
from placed_engine import PlacedRank, placement_of, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("share", [0.02, 0.9])
def test_a_delta_in_place_has_the_bits_of_a_cpu(ranks: int, share: float) -> None:
    torch.manual_seed(0)
    old = state_of(0)
    words = {name: tensor.view(torch.int16) for name, tensor in old.items()}
    new = {
        name: torch.where(torch.rand(word.shape) < share, word + torch.randint(-9, 9, word.shape).short(), word)
        for name, word in words.items()
    }
    before, after = (whole_snapshot({n: t.view(old[n].dtype) for n, t in state.items()}) for state in (words, new))
    tensors = tuple(replace(entry, digest=digest_bytes(sum128(new[entry.name]))) for entry in after.tensors)
    line = VersionLine(run_id="run", epoch=1)
    manifest = line.manifest(2, Transport.STREAM, tensors, digest_algorithm=SUM128)
    parts = []
    with ThreadPoolExecutor(2) as threads:
        made = encode(Rows(manifest.tensors), before.flat.numpy(), after.flat.numpy(), threads)
    delta = write_stream([packed for _, packed in made])
    for rank in range(ranks):
        engine = PlacedRank(rank, ranks)
        placement = placement_of(engine, old)
        on_gpu = {name: parameter.cuda() for name, parameter in engine.parameters.items()}
        placement.patch(manifest, delta, engine.parameters, 2)
        placement.patch(manifest, delta, on_gpu, 2)
        for name, parameter in engine.parameters.items():
            assert torch.equal(on_gpu[name].cpu().view(torch.int16), parameter.view(torch.int16)), name
        assert placement.digests(on_gpu) == placement.digests(engine.parameters)
        parts.append(placement.digests(on_gpu))
    check_parts(manifest, parts)
