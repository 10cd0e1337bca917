"""The nccl transport on GPUs: the digest is the CPU's, versions cross to the bit, and a lost peer costs no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from meshrl.versions.collective.broadcasting import Receiver, Sender
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.versions.collective.digest import digest_bytes, sum128, sum128_each
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.placement import WeightPlacement, check_parts
from meshrl.versions.snapshot import take_snapshot
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import CollectivePlan, JoinGroup, Manifest, TensorEntry, Transport
from placed_engine import PlacedRank, placement_of, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# A broken connection is what NCCL hears of between hosts; torch's own answer to it comes within the second.
BETWEEN_HOSTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
MEET_S = 60.0
STALL_S = 5.0


def weights(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(3001, 1024).bfloat16().to(device),
        "layer.0.norm": torch.randn(5).to(device),
        "layer.0.proj": torch.randn(7, 3).bfloat16().to(device),
        "layer.1.empty": torch.zeros(0, 4, dtype=torch.bfloat16, device=device),
    }


def manifest_of(state: dict[str, torch.Tensor], plan: CollectivePlan) -> Manifest:
    specs = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items()]
    tensors = tuple(
        TensorEntry(
            name=p.name, dtype=p.dtype, shape=p.shape, offset=p.offset, num_bytes=p.num_bytes,
            digest=digest_bytes(sum128(state[p.name].cpu())),
        )
        for p in manifests.plan_tensors(specs)
    )  # fmt: skip
    return manifests.build_manifest(
        run_id="main", epoch=1, version=1, transport=Transport.NCCL, tensors=tensors, chunks=(),
        collective=plan,
    )  # fmt: skip


def join(port: int, device: torch.device, placement: WeightPlacement | None = None) -> Receiver:
    group = JoinGroup(
        generation=1, store_address=f"127.0.0.1:{port}", backend="nccl", num_senders=1, num_receivers=1,
        first_receiver=0, deadline_s=MEET_S,
    )  # fmt: skip
    return Receiver.join(group, index=0, device=device, placement=placement)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("num", [0, 1, 3, 4095, 4097, 2**20 + 7])
@pytest.mark.parametrize("first_word", [0, 2**33 + 1])
def test_a_gpus_digest_is_that_of_the_cpu(dtype: torch.dtype, num: int, first_word: int) -> None:
    tensor = torch.randint(0, 256, (num * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    expected = digest_bytes(sum128(tensor, first_word))
    for index in range(torch.cuda.device_count()):  # the thread's device is the first one throughout
        assert digest_bytes(sum128(tensor.to(f"cuda:{index}"), first_word)) == expected


def test_digests_of_many_tensors_at_once_are_those_of_each() -> None:
    room = torch.randint(0, 256, (2**20,), dtype=torch.uint8).cuda()
    places = [(0, 0), (0, 5), (1, 8192), (16, 70_001), (4098, 2**20), (7, 9)]
    tensors, first = [room[begin:end] for begin, end in places], [3 * index for index in range(len(places))]
    expected = torch.stack([sum128(tensor.cpu(), at) for tensor, at in zip(tensors, first, strict=True)])
    assert torch.equal(sum128_each(tensors, first).cpu(), expected)


@two_gpus
def test_versions_cross_to_the_bit_until_the_group_is_ended() -> None:
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    state = weights(here)
    plan = CollectivePlan(num_senders=1, bucket_bytes=4096)
    manifest = manifest_of(state, plan)
    store = open_store("127.0.0.1", deadline_s=MEET_S)
    threads = ThreadPoolExecutor(2)
    meeting = threads.submit(
        Sender.meet, store, generation=1, backend="nccl", sender=0, num_receivers=1, device=here, deadline_s=MEET_S
    )
    receiver = threads.submit(join, store.port, there).result(MEET_S)
    sender = meeting.result(MEET_S)
    for _ in range(2):
        snapshot = take_snapshot(PublishPlan(tensors=manifest.tensors, collective=plan), state, 0, here)
        sending = threads.submit(sender.send, snapshot, stall_s=STALL_S)
        got: dict[str, torch.Tensor] = {}
        receiver.receive(manifest, lambda ts: got.update({n: t.clone() for n, t in ts}), stall_s=STALL_S)  # noqa: B023 - called now
        sending.result(STALL_S)
        assert got.keys() == state.keys()
        assert all(torch.equal(got[name].cpu(), state[name].cpu()) for name in state)
    threading.Timer(0.5, receiver.abort).start()
    began_s = time.monotonic()
    with pytest.raises(MeshError, match="was ended") as caught:
        receiver.receive(manifest, lambda _: None, stall_s=60.0)
    assert caught.value.reason is Reason.GROUP_BROKEN
    assert time.monotonic() - began_s < 5.0
    sender.abort()


@two_gpus
def test_a_rank_takes_its_parts_out_of_broadcasts_to_the_bit() -> None:
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    engine = PlacedRank()
    placement = placement_of(engine, state_of(0))
    parameters = {name: parameter.to(there) for name, parameter in engine.parameters.items()}
    store = open_store("127.0.0.1", deadline_s=MEET_S)
    threads = ThreadPoolExecutor(2)
    meeting = threads.submit(
        Sender.meet, store, generation=1, backend="nccl", sender=0, num_receivers=1, device=here, deadline_s=MEET_S
    )
    receiver = threads.submit(join, store.port, there, placement).result(MEET_S)
    sender = meeting.result(MEET_S)
    for seed, bucket_bytes in ((1, 1), (2, 200), (3, 2**20)):
        state = state_of(seed)
        plan = CollectivePlan(num_senders=1, bucket_bytes=bucket_bytes)
        manifest = manifest_of(state, plan)
        on_gpu = {name: tensor.to(here) for name, tensor in state.items()}
        snapshot = take_snapshot(PublishPlan(tensors=manifest.tensors, collective=plan), on_gpu, 0, here)
        sending = threads.submit(sender.send, snapshot, stall_s=STALL_S)
        _, digests = receiver.receive_held(manifest, parameters, stall_s=STALL_S)
        sending.result(STALL_S)
        check_parts(manifest, [digests])
        engine.load(state)
        assert all(torch.equal(parameters[name].cpu(), held) for name, held in engine.parameters.items())
    sender.abort()
    with pytest.raises(MeshError) as caught:
        receiver.receive_held(manifest, parameters, stall_s=STALL_S)
    assert caught.value.reason is Reason.GROUP_BROKEN


@two_gpus
@pytest.mark.timeout(180)
@pytest.mark.parametrize("environment", [{}, BETWEEN_HOSTS], ids=["one host", "between hosts"])
def test_a_receiver_whose_sender_is_killed_raises_in_time_and_lives_on(environment: dict[str, str]) -> None:
    store = open_store("127.0.0.1", deadline_s=MEET_S)
    command = [sys.executable, str(Path(__file__).resolve()), str(store.port)]
    paths = os.pathsep.join(path for path in sys.path if path)
    with (
        subprocess.Popen([*command, "sender"], env={**os.environ, **environment, "PYTHONPATH": paths}) as sender,
        subprocess.Popen([*command, "receiver"], env={**os.environ, **environment, "PYTHONPATH": paths}) as receiver,
    ):
        assert sender.wait(120) == -signal.SIGKILL
        assert receiver.wait(60) == 0


def _sender(port: int) -> None:
    device = torch.device("cuda:0")
    store = reach_store(f"127.0.0.1:{port}", deadline_s=MEET_S)
    held = Sender.meet(store, generation=1, backend="nccl", sender=0, num_receivers=1, device=device, deadline_s=MEET_S)
    store.wait(["receiver is in"], timedelta(seconds=MEET_S))
    time.sleep(1.0)
    assert held is not None  # whoever lets go of a sender closes its connections, which would be another end
    os.kill(os.getpid(), signal.SIGKILL)


def _receiver(port: int) -> None:
    device = torch.device("cuda:1")
    receiver = join(port, device)
    manifest = manifest_of(weights(device), CollectivePlan(num_senders=1, bucket_bytes=4096))
    reach_store(f"127.0.0.1:{port}", deadline_s=MEET_S).set("receiver is in", "")
    began_s = time.monotonic()
    with pytest.raises(MeshError) as caught:
        receiver.receive(manifest, lambda _: None, stall_s=STALL_S)
    assert caught.value.reason is Reason.GROUP_BROKEN
    assert time.monotonic() - began_s < STALL_S + 5.0
    receiver.close()
    time.sleep(8.0)  # whatever torch would do to the process, it has done by then
    assert float(torch.ones(3, device=device).sum()) == 3.0


if __name__ == "__main__":
    {"sender": _sender, "receiver": _receiver}[sys.argv[2]](int(sys.argv[1]))
