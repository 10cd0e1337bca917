"""Every type of the mesh becomes a message and comes back the same."""

import dataclasses

import numpy as np
import pytest

from meshrl.wire import convert
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import artifact_id
from meshrl.wire.types import (
    Abort,
    Activation,
    ActivationPolicy,
    AgentFault,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    Chunk,
    ChunkEntry,
    Commit,
    DrainAgent,
    EngineEndpoint,
    EngineInfo,
    EngineReport,
    EnvironmentInfo,
    FileEntry,
    Lease,
    Manifest,
    MessageSpan,
    Prepare,
    Resume,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    RolloutStatus,
    RolloutSummary,
    RunInfo,
    Sample,
    Sampling,
    StagedVersion,
    StepEvent,
    StepState,
    TensorEntry,
    TrainerInfo,
    Transport,
    VersionEvent,
    VersionInfo,
    VersionKind,
    VersionSpan,
    VersionState,
)

SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, max_tokens=64, stop_token_ids=(1, 2), seed=11)
REQUEST = RolloutRequest(
    request_id="q",
    group_id="g",
    environment="e",
    task_index=0,
    group_size=4,
    sampling=SAMPLING,
    engine_pool="p",
    min_version=0,
    deadline_s=12.5,
    traceparent="t",
    scores_only=True,
    conversations=True,
)
APPLIED = ApplyReport(version=3, root=b"r", pause_s=0.1, prepare_s=0.2, requests_kept=4)
VERSION = VersionInfo(
    run_id="r",
    epoch=1,
    version=3,
    artifact_id="a",
    state=VersionState.SEALED,
    num_bytes=10,
    transport=Transport.STREAM,
    traceparent="t",
)
MANIFEST = Manifest(
    run_id="r",
    epoch=2,
    version=0,
    kind=VersionKind.DELTA,
    transport=Transport.FILESYSTEM,
    base_version=0,
    base_root=b"b",
    result_root=b"root",
    layout_signature=b"sig",
    codec="raw",
    tensors=(TensorEntry(name="w", dtype="bfloat16", shape=(2, 3), offset=0, num_bytes=12, digest=b"d"),),
    chunks=(ChunkEntry(offset=0, length=12, digest=b"c"),),
    files=(FileEntry(path="/x", offset=0, num_bytes=12),),
)


def make_sample(**changes):
    sample = Sample(
        token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([False, True, True, False]),
        logprobs=np.array([0.0, -0.5, -1.5, 0.0], dtype=np.float32),
        version_spans=(VersionSpan(start=1, end=2, version=3), VersionSpan(start=2, end=3, version=4)),
        message_spans=(MessageSpan(start=0, end=1, role="user"), MessageSpan(start=1, end=4, role="assistant")),
        temperature=0.7,
    )
    return dataclasses.replace(sample, **changes)


def same(left, right):
    """Equality that looks into arrays, which dataclasses do not compare."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if dataclasses.is_dataclass(left):
        fields = dataclasses.fields(left)
        return type(left) is type(right) and all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def rollout(**changes):
    made = Rollout(
        rollout_id="o",
        group_id="g",
        task_key="k",
        environment="e",
        agent="a",
        samples=(make_sample(),),
        reward=0.1,
        reward_parts={"lcs": 0.1},
        metrics={"m": 2.0},
        finish_reason="stop",
        truncated=True,
        num_turns=2,
        timings_s={"total": 0.5},
        traceparent="t",
        completion="text",
        episode_id="e",
        conversations=('{"messages": []}', "{}"),
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("value", "to_proto", "from_proto"),
    [
        (SAMPLING, convert.to_proto, None),
        (Sampling(), convert.to_proto, None),
        (Sampling(temperature=0.0, seed=0), convert.to_proto, None),
        (
            EnvironmentInfo(name="e", taskset="t", num_tasks=0, agents=("a",), default_sampling=SAMPLING),
            convert.to_proto,
            None,
        ),
        (
            EnvironmentInfo(name="e", taskset="t", num_tasks=None, package_version="1"),
            convert.to_proto,
            None,
        ),
        (REQUEST, convert.to_proto, None),
        (
            dataclasses.replace(REQUEST, task_index=None, task_payload="{}", min_version=None, exact_version=0),
            convert.to_proto,
            None,
        ),
        (make_sample(), convert.to_proto, None),
        (rollout(), convert.rollout_event_to_proto, convert.rollout_event_from_proto),
        (rollout(samples=()), convert.to_proto, None),
        (
            RolloutFailure(
                rollout_id="o", group_id="g", reason="ENGINE_FAILED", message="m", retryable=True, traceparent="00-1"
            ),
            convert.rollout_event_to_proto,
            convert.rollout_event_from_proto,
        ),
        (
            RolloutSummary(finished=1, failed=2, cancelled=3, sampled_tokens=4),
            convert.rollout_event_to_proto,
            convert.rollout_event_from_proto,
        ),
        (
            RolloutStatus(
                running=1,
                queued=2,
                finished=3,
                failures={"X": 1},
                rollouts_per_s=0.5,
                engines=(
                    EngineEndpoint(url="u", healthy=True, version=0, in_flight=2, logprobs_mode="raw_logprobs"),
                    EngineEndpoint(url="v", healthy=True, version=0, in_flight=0, slots=512, kv_tokens=2**33),
                ),
                draining=True,
                max_concurrent=832,
                limit_reason="auto",
            ),
            convert.to_proto,
            None,
        ),
        (
            TrainerInfo(
                world_size=1,
                dp_size=1,
                seq_len=8,
                pad_multiple=1,
                objective="default",
                model="m",
                runs=(RunInfo(run_id="r", step=1, version=1, epoch=2, revision=3, durable_step=1),),
                max_queued_batches=2,
                max_message_bytes=4096,
                min_shared_prefix=0.0,
            ),
            convert.to_proto,
            None,
        ),
        (
            StepEvent(revision=1, step=1, state=StepState.DONE, version=0, metrics={"a": 1.0}, timings_s={"b": 2.0}),
            convert.to_proto,
            convert.step_event_from_proto,
        ),
        (
            StepEvent(
                revision=1,
                step=1,
                state=StepState.FAILED,
                reason="STEP_FAILED",
                message="m",
                traceparent="t",
                durable_step=1,
            ),
            convert.to_proto,
            convert.step_event_from_proto,
        ),
        (MANIFEST, convert.to_proto, None),
        (Chunk(offset=1, data=b"abc", crc32c=2), convert.to_proto, None),
        (
            StagedVersion(artifact_id="a", missing_offsets=(0, 5), max_chunk_bytes=10),
            convert.to_proto,
            None,
        ),
        (
            AgentRegistration(
                engine_id="i",
                url="http://x",
                engine_pool="p",
                transports=(Transport.STREAM, Transport.NCCL),
                layout_signature=b"s",
                held_version=0,
                held_root=b"r",
                collective_ranks=4,
                collective_backend="nccl",
                host="h",
            ),
            convert.to_proto,
            None,
        ),
        (
            Lease(lease_id="l", lease_s=5.0, max_chunk_bytes=10, committed_version=None),
            convert.to_proto,
            None,
        ),
        (
            AgentReport(lease_id="l", state=AgentState.READY, serving_version=0, applied=APPLIED),
            convert.to_proto,
            None,
        ),
        (
            AgentReport(
                lease_id="l",
                state=AgentState.FETCHING,
                target_version=4,
                target_artifact_id="a",
                group_generation=3,
                fault=AgentFault(reason="CHUNK_CORRUPT", message="m"),
            ),
            convert.to_proto,
            None,
        ),
        (Prepare(version=0, artifact_id="a"), convert.agent_command_to_proto, convert.agent_command_from_proto),
        (
            Commit(version=1, artifact_id="a", hold=True),
            convert.agent_command_to_proto,
            convert.agent_command_from_proto,
        ),
        (Abort(version=0), convert.agent_command_to_proto, convert.agent_command_from_proto),
        (Resume(version=2), convert.agent_command_to_proto, convert.agent_command_from_proto),
        (DrainAgent(), convert.agent_command_to_proto, convert.agent_command_from_proto),
        (
            EngineInfo(
                engine_id="i",
                url="u",
                engine_pool="p",
                state=AgentState.POISONED,
                serving_version=None,
                routable=False,
                last_seen_s=0.5,
                last_fault=AgentFault(reason="r", message="m"),
                transports=(Transport.FILESYSTEM, Transport.NCCL),
                collective_ranks=2,
                collective_backend="nccl",
                group_generation=3,
                host="h",
            ),
            convert.to_proto,
            None,
        ),
        (VERSION, convert.to_proto, convert.version_info_from_proto),
        (
            VersionEvent(revision=9, version=VERSION),
            convert.to_proto,
            convert.version_event_from_proto,
        ),
        (
            Activation(
                version=VERSION,
                engines=(EngineReport(engine_id="i", applied=APPLIED),),
                commit_s=0.25,
                lag_s=0.5,
            ),
            convert.to_proto,
            None,
        ),
        *(
            (policy, convert.activation_policy_to_proto, convert.activation_policy_from_proto)
            for policy in ActivationPolicy
        ),
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else "",
)
def test_values_survive_the_trip(value, to_proto, from_proto):
    message = to_proto(value)
    if not isinstance(message, int):
        message = type(message).FromString(message.SerializeToString())
    back = convert.from_proto(type(value), message) if from_proto is None else from_proto(message)
    assert same(back, value)


def test_the_identity_of_a_version_survives_the_trip():
    assert artifact_id(convert.from_proto(Manifest, convert.to_proto(MANIFEST))) == artifact_id(MANIFEST)


class TestSamples:
    def refuse(self, **changes):
        with pytest.raises(MeshError) as refused:
            convert.from_proto(Sample, convert.to_proto(make_sample(**changes)), "samples[0]")
        return [str(violation.field) for violation in refused.value.violations]

    def test_lengths_must_agree(self):
        assert self.refuse(loss_mask=np.zeros(3, dtype=bool), logprobs=np.zeros(5, dtype=np.float32)) == [
            "samples[0].loss_mask",
            "samples[0].logprobs",
        ]

    def test_every_sampled_token_needs_a_version(self):
        assert self.refuse(version_spans=(VersionSpan(start=1, end=2, version=3),)) == ["samples[0].version_spans"]

    @pytest.mark.parametrize("bounds", [((1, 3), (2, 4)), ((1, 9),), ((2, 3), (1, 2)), ((1, 1), (1, 3))])
    def test_spans_are_sorted_disjoint_and_within(self, bounds):
        spans = tuple(VersionSpan(start=start, end=end, version=1) for start, end in bounds)
        assert self.refuse(version_spans=spans) == ["samples[0].version_spans"]

    @pytest.mark.parametrize("content", [(0, 2), (1, 5), (3, 2), (1, None), (None, 2)])
    def test_the_content_of_a_message_is_within_it_and_has_both_ends(self, content):
        start, end = content
        span = MessageSpan(start=1, end=4, role="tool", content_start=start, content_end=end)
        assert self.refuse(message_spans=(span,)) == ["samples[0].message_spans[0]"]


@pytest.mark.parametrize("content", [(None, None), (0, 0), (1, 3)])
def test_a_message_keeps_what_of_it_is_content(content):
    start, end = content
    span = MessageSpan(start=0, end=4, role="tool", text="so", content_start=start, content_end=end)
    message = convert.to_proto(make_sample(message_spans=(span,)))
    assert convert.from_proto(Sample, message).message_spans == (span,)


@pytest.mark.parametrize("prompt_version", [None, 0, 2])
def test_span_keeps_which_version_computed_the_prompt(prompt_version):
    span = VersionSpan(start=1, end=3, version=3, prompt_version=prompt_version)
    message = convert.to_proto(make_sample(version_spans=(span,)))
    assert convert.from_proto(Sample, message).version_spans == (span,)
    tail = "" if prompt_version is None else f"20{prompt_version:02x}"
    assert message.version_spans[0].SerializeToString().hex() == f"080110031803{tail}"
