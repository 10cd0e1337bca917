"""The bytes on the wire are those of every earlier release: old clients and servers must still understand each other.

A difference here is a change of the contract: add a case, never edit one. Here are tensors, and messages that have a
conversion of their own. All others go field by field under the names of the descriptors, which may not change either
(`tests/unit/wire/test_contract_version.py`).
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from meshrl.wire import convert, frames, tensors
from meshrl.wire.errors import FieldViolation, MeshError, Reason, to_rpc_status
from meshrl.wire.types import (
    Batch,
    Chunk,
    ChunkEntry,
    Commit,
    Manifest,
    MessageSpan,
    MicroBatch,
    Rollout,
    RolloutRequest,
    Sample,
    Sampling,
    StepEvent,
    StepState,
    TensorEntry,
    Transport,
    VersionInfo,
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
    yield "batch_header", upload[0].SerializeToString()
    yield "micro_batch", upload[1].SerializeToString()
    event = StepEvent(revision=4, step=3, state=StepState.DONE, version=0, metrics={"loss/mean": 0.5})
    yield "step_event", convert.to_proto(event).SerializeToString()
    yield "micro_batch_with_weights", list(convert.batch_to_messages(WEIGHTED_BATCH))[1].SerializeToString()
    yield "micro_batch_with_candidates", list(convert.batch_to_messages(CANDIDATE_BATCH))[1].SerializeToString()
    yield "micro_batch_with_prefix", list(convert.batch_to_messages(SHARED_BATCH))[1].SerializeToString()
    given = dataclasses.replace(event, logprobs={"b": np.array([-0.5, -2.0], dtype=np.float32)})
    yield "step_event_logprobs", convert.to_proto(given).SerializeToString()
    yield "manifest", convert.to_proto(manifest).SerializeToString()
    yield "upload_chunk", frames.frame_upload_chunk(Chunk(offset=8, data=b"bytes", crc32c=0x01020304))
    yield "fetch_chunk", frames.frame_fetch_chunk(Chunk(offset=8, data=b"bytes", crc32c=0x01020304))
    yield (
        "agent_command",
        convert.agent_command_to_proto(Commit(version=2, artifact_id="a", hold=True)).SerializeToString(),
    )
    yield "version_info", convert.to_proto(version).SerializeToString()
    yield "error_status", to_rpc_status(error).SerializeToString()


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
