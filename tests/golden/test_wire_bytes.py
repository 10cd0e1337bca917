"""The bytes on the wire are those of every earlier release: old clients and servers must still understand each other.

A difference here is a change of the contract. Only fields may be added; then add a case, never edit one.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from meshrl.v1 import exchange_pb2, weights_pb2
from meshrl.wire import convert, frames, tensors
from meshrl.wire.errors import FieldViolation, MeshError, Reason, to_rpc_status
from meshrl.wire.types import (
    AdapterConfig,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    Batch,
    Chunk,
    ChunkEntry,
    CollectivePlan,
    Commit,
    EngineEndpoint,
    EngineInfo,
    GroupMember,
    JoinGroup,
    Manifest,
    MessageSpan,
    MicroBatch,
    OpenedGroup,
    Rollout,
    RolloutRequest,
    RolloutStatus,
    Sample,
    Sampling,
    Sleep,
    SleepOutcome,
    StepEvent,
    StepState,
    TensorEntry,
    TrainerInfo,
    Transport,
    VersionInfo,
    VersionKind,
    VersionSpan,
    VersionState,
)

GOLDEN = Path(__file__).parent / "wire" / "messages.json"

SAMPLE = Sample(
    token_ids=np.array([1, 2, 300], dtype=np.int32),
    loss_mask=np.array([False, True, True]),
    logprobs=np.array([0.0, -0.5, -1.25], dtype=np.float32),
    version_spans=(VersionSpan(start=1, end=3, version=7),),
    message_spans=(MessageSpan(start=0, end=1, role="user"),),
    temperature=0.5,
)
BATCH = Batch(
    run_id="run",
    step=3,
    micro_batches=(
        MicroBatch(
            dp_rank=0,
            token_ids=np.array([1, 2, 3], dtype=np.int32),
            position_ids=np.array([0, 1, 0], dtype=np.int32),
            loss_mask=np.array([False, True, True]),
            advantages=np.array([0.0, 0.5, -0.5], dtype=np.float32),
            inference_logprobs=np.array([0.0, -1.0, -2.0], dtype=np.float32),
            sample_offsets=np.array([0, 2, 3], dtype=np.int64),
            temperatures=np.array([1.0, 0.5], dtype=np.float32),
            env_index=np.array([0, 0], dtype=np.int32),
            rollout_ids=("a", "b"),
        ),
    ),
    loss_tokens=2,
    environments=("reverse_text",),
)

WEIGHTED_BATCH = dataclasses.replace(
    BATCH,
    micro_batches=(
        dataclasses.replace(
            BATCH.micro_batches[0],
            rl_weights=np.array([0.0, 2.0, 1.0], dtype=np.float32),
            ce_weights=np.array([0.0, 0.5, 0.0], dtype=np.float32),
            ref_kl_weights=np.array([0.0, 1.0, 0.0], dtype=np.float32),
            ref_logprobs=np.array([0.0, -1.5, 0.0], dtype=np.float32),
        ),
    ),
)


SHARED_BATCH = dataclasses.replace(
    BATCH,
    micro_batches=(
        dataclasses.replace(
            BATCH.micro_batches[0],
            position_ids=np.array([0, 1, 1], dtype=np.int32),
            prefix_tokens=np.array([0, 1], dtype=np.int32),
            prefix_samples=np.array([0, 0], dtype=np.int32),
        ),
    ),
)


CANDIDATE_BATCH = dataclasses.replace(
    WEIGHTED_BATCH,
    micro_batches=(
        dataclasses.replace(
            WEIGHTED_BATCH.micro_batches[0],
            ref_top_ids=np.array([[-1, -1], [7, 3], [-1, -1]], dtype=np.int32),
            ref_top_logprobs=np.array([[0.0, 0.0], [-0.5, -1.5], [0.0, 0.0]], dtype=np.float32),
        ),
    ),
)


TRAINER = TrainerInfo(
    world_size=1,
    dp_size=1,
    seq_len=8,
    pad_multiple=1,
    objective="default",
    model="m",
    runs=(),
    max_queued_batches=2,
    min_shared_prefix=0.25,
)


def messages():
    """Name and bytes of every case; maps hold one entry, since protobuf does not order them."""
    request = RolloutRequest(
        request_id="id",
        group_id="g",
        environment="reverse_text",
        task_index=0,
        group_size=8,
        sampling=Sampling(temperature=0.0, top_p=0.5, max_tokens=16, stop_token_ids=(2,), seed=0),
        min_version=0,
        deadline_s=60.0,
    )
    rollout = Rollout(
        rollout_id="r",
        group_id="g",
        task_key="t",
        environment="e",
        samples=(SAMPLE,),
        reward=0.5,
        reward_parts={"lcs": 0.5},
        finish_reason="stop",
    )
    manifest = Manifest(
        run_id="run",
        epoch=1,
        version=0,
        transport=Transport.STREAM,
        result_root=b"root",
        layout_signature=b"layout",
        tensors=(TensorEntry(name="w", dtype="bfloat16", shape=(2, 2), offset=0, num_bytes=8, digest=b"d"),),
        chunks=(ChunkEntry(offset=0, length=8, digest=b"c"),),
    )
    applied = ApplyReport(version=2, root=b"root", pause_s=0.25, prepare_s=0.5, requests_kept=3)
    version = VersionInfo(
        run_id="run",
        epoch=1,
        version=2,
        artifact_id="a",
        state=VersionState.COMMITTED,
        num_bytes=8,
        transport=Transport.FILESYSTEM,
    )
    error = MeshError(
        Reason.VERSION_NOT_AVAILABLE, "no", violations=[FieldViolation("min_version", "is 3")], retry_after_s=0.5
    )
    upload = list(convert.batch_to_messages(BATCH))
    yield "tensor_bfloat16", tensors.encode(np.array([0x3F80], dtype=np.uint16), "bfloat16").SerializeToString()
    yield "rollout_request", convert.to_proto(request).SerializeToString()
    yield "rollout_event", convert.rollout_event_to_proto(rollout).SerializeToString()
    asking = dataclasses.replace(request, conversations=True)
    yield "rollout_request_conversations", convert.to_proto(asking).SerializeToString()
    said = dataclasses.replace(rollout, samples=(), conversations=('{"messages": []}',))
    yield "rollout_with_conversations", convert.to_proto(said).SerializeToString()
    yield "batch_header", upload[0].SerializeToString()
    yield "micro_batch", upload[1].SerializeToString()
    event = StepEvent(revision=4, step=3, state=StepState.DONE, version=0, metrics={"loss/mean": 0.5})
    yield "step_event", convert.to_proto(event).SerializeToString()
    yield "micro_batch_with_weights", list(convert.batch_to_messages(WEIGHTED_BATCH))[1].SerializeToString()
    yield "micro_batch_with_candidates", list(convert.batch_to_messages(CANDIDATE_BATCH))[1].SerializeToString()
    yield "micro_batch_with_prefix", list(convert.batch_to_messages(SHARED_BATCH))[1].SerializeToString()
    yield "trainer_info", convert.to_proto(TRAINER, contract_version="1.0").SerializeToString()
    yield (
        "step_event_durable",
        convert.to_proto(StepEvent(revision=5, step=3, state=StepState.DONE, durable_step=2)).SerializeToString(),
    )
    asking_batch = dataclasses.replace(BATCH, logprob_rollouts=("b", "a"))
    yield "batch_header_asking", next(iter(convert.batch_to_messages(asking_batch))).SerializeToString()
    given = dataclasses.replace(event, logprobs={"b": np.array([-0.5, -2.0], dtype=np.float32)})
    yield "step_event_logprobs", convert.to_proto(given).SerializeToString()
    yield "manifest", convert.to_proto(manifest).SerializeToString()
    yield "upload_chunk", frames.frame_upload_chunk(Chunk(offset=8, data=b"bytes", crc32c=0x01020304))
    yield "fetch_chunk", frames.frame_fetch_chunk(Chunk(offset=8, data=b"bytes", crc32c=0x01020304))
    report = AgentReport(lease_id="l", state=AgentState.READY, serving_version=2, applied=applied)
    yield "agent_report", convert.to_proto(report).SerializeToString()
    yield (
        "agent_command",
        convert.agent_command_to_proto(Commit(version=2, artifact_id="a", hold=True)).SerializeToString(),
    )
    yield from group_messages(manifest)
    yield from exchange_messages(request)
    yield "version_info", convert.to_proto(version).SerializeToString()
    yield "error_status", to_rpc_status(error).SerializeToString()


def exchange_messages(request):
    """What goes between the orchestrator and a worker that dials in."""
    hello = exchange_pb2.WorkerHello(
        contract_version="1.0",
        worker="box",
        incarnation="i",
        room=8,
        calls=[exchange_pb2.HeldCall(call_id="c", last_seq=3, playing=True)],
    )
    end = exchange_pb2.CallEnd(reason="OVERLOADED", message="full", retry_after_s=1.5)
    lease = exchange_pb2.WorkerLease(
        contract_version="1.0",
        lease_s=60.0,
        heartbeat_s=5.0,
        credit=256,
        calls=[exchange_pb2.CallCursor(call_id="c", next_seq=2)],
    )
    start = exchange_pb2.StartCall(call_id="c", request=convert.to_proto(request))
    ack = exchange_pb2.EventAck(call_id="c", seq=3, unneeded=True)
    beat = exchange_pb2.WorkerHeartbeat(number=4, room=7)
    up = {"hello": hello, "heartbeat": beat, "event": exchange_pb2.CallEvent(call_id="c", seq=3, end=end)}
    down = {
        "lease": lease,
        "start": start,
        "cancel": exchange_pb2.CancelCall(call_id="c"),
        "ack": ack,
        "credit": exchange_pb2.EventCredit(events=2),
        "answer": exchange_pb2.HeartbeatAnswer(number=4),
    }
    for name, message in up.items():
        yield f"exchange_{name}", exchange_pb2.AttachRequest(**{name: message}).SerializeToString()
    for name, message in down.items():
        yield f"exchange_{name}", exchange_pb2.AttachResponse(**{name: message}).SerializeToString()


def group_messages(manifest):
    """What came with groups for the nccl transport, and with adapters."""
    collective = dataclasses.replace(
        manifest,
        transport=Transport.NCCL,
        chunks=(),
        digest_algorithm="sum128",
        collective=CollectivePlan(num_senders=2, bucket_bytes=64, whole_tensors=(0,)),
    )
    adapter = AdapterConfig(rank=4, lora_alpha=8.0, target_modules=("q_proj",), base_model="m")
    lora = dataclasses.replace(manifest, kind=VersionKind.LORA, adapter=adapter)
    yield "manifest_nccl", convert.to_proto(collective).SerializeToString()
    yield "manifest_lora", convert.to_proto(lora).SerializeToString()
    seat = {"collective_ranks": 2, "collective_backend": "nccl", "host": "h"}
    registration = AgentRegistration(
        engine_id="e", url="http://e", transports=(Transport.NCCL,), layout_signature=b"layout", **seat
    )
    yield "registration_nccl", convert.to_proto(registration).SerializeToString()
    report = AgentReport(
        lease_id="l", state=AgentState.PREPARED, target_version=2, group_generation=3, target_artifact_id="a"
    )
    yield "agent_report_in_group", convert.to_proto(report).SerializeToString()
    join = JoinGroup(
        generation=3,
        store_address="h:1",
        backend="nccl",
        num_senders=2,
        num_receivers=4,
        first_receiver=2,
        deadline_s=30.0,
    )
    yield "agent_command_join_group", convert.agent_command_to_proto(join).SerializeToString()
    opened = OpenedGroup(generation=3, members=(GroupMember(engine_id="e", first_receiver=2, num_ranks=2),))
    yield "opened_group", convert.to_proto(opened).SerializeToString()
    engine = EngineInfo(
        engine_id="e",
        url="http://e",
        engine_pool="",
        state=AgentState.READY,
        serving_version=2,
        routable=True,
        last_seen_s=0.5,
        transports=(Transport.NCCL,),
        group_generation=3,
        **seat,
    )
    yield "engine_info_nccl", convert.to_proto(engine).SerializeToString()
    asked = weights_pb2.OpenGroupRequest(
        request_id="id",
        run_id="run",
        epoch=1,
        store_address="h:1",
        backend="nccl",
        num_senders=2,
        engine_ids=["e"],
        without=["f"],
        deadline_s=30.0,
    )
    yield "open_group_request", asked.SerializeToString()
    sleeper = dataclasses.replace(registration, can_sleep=True)
    yield "registration_can_sleep", convert.to_proto(sleeper).SerializeToString()
    answer = dataclasses.replace(report, sleeping=True, sleep_answered=4)
    yield "agent_report_sleeping", convert.to_proto(answer).SerializeToString()
    status = RolloutStatus(
        running=5,
        queued=2,
        finished=3,
        failures={},
        rollouts_per_s=0.5,
        engines=(EngineEndpoint(url="u", healthy=True, version=0, in_flight=2, slots=512, kv_tokens=2**33),),
        draining=False,
        max_concurrent=576,
        limit_reason="auto",
    )
    yield "rollout_status_limit", convert.to_proto(status).SerializeToString()
    yield "agent_command_sleep", convert.agent_command_to_proto(Sleep(number=4)).SerializeToString()
    asleep = dataclasses.replace(engine, sleeping=True, can_sleep=True)
    yield "engine_info_sleeping", convert.to_proto(asleep).SerializeToString()
    told = dataclasses.replace(engine, layout_signature=b"layout")
    yield "engine_info_layout", convert.to_proto(told).SerializeToString()
    yield "sleep_request", weights_pb2.SleepEnginesRequest(engine_pool="p", deadline_s=30.0).SerializeToString()
    outcome = SleepOutcome(asleep=2, awake=1, seconds=0.5)
    yield "sleep_outcome", convert.to_proto(outcome).SerializeToString()
    spoken = dataclasses.replace(SAMPLE, message_spans=(MessageSpan(start=0, end=1, role="user", text="why?"),))
    yield "sample_with_text", convert.to_proto(spoken).SerializeToString()
    told = MessageSpan(start=0, end=2, role="tool", text="why?", content_start=0, content_end=1)
    marked = dataclasses.replace(SAMPLE, message_spans=(told,))
    yield "sample_with_content", convert.to_proto(marked).SerializeToString()


@pytest.mark.parametrize(("name", "data"), list(messages()), ids=lambda value: value if isinstance(value, str) else "")
def test_bytes_are_what_they_were(name, data):
    assert data.hex() == json.loads(GOLDEN.read_text())[name]


def test_every_stored_message_is_still_written():
    assert {name for name, _ in messages()} == set(json.loads(GOLDEN.read_text()))


def test_the_digest_of_a_batch_is_what_it_was():
    assert convert.batch_digest(BATCH) == "81e94ef9feaf623a05c73752eb1a2d5d1fd42a705851f7b5236bfc0bfe753650"
    assert convert.batch_digest(WEIGHTED_BATCH) == "40fbdf2d95eeae1692b689333e1f393ac599bb1ac51f94ea6f4ba0f43537e965"
    assert convert.batch_digest(CANDIDATE_BATCH) == "f5bd17e1abb165c673a8827761d0f8bea39fb62d13d8eac685f3646c1a6750e6"
    assert convert.batch_digest(SHARED_BATCH) == "a11f5722841371c3d06d7d2a40ad52eec07f3a6cbd240e8fdb7a85c29894c2d0"
