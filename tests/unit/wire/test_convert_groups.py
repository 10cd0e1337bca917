"""Groups, versions that travel in one or hold an adapter, and sleep become messages and come back the same."""

import pytest

from meshrl.wire import convert
from meshrl.wire.types import (
    AdapterConfig,
    AgentRegistration,
    AgentReport,
    AgentState,
    CollectivePlan,
    EngineInfo,
    GroupMember,
    JoinGroup,
    Manifest,
    OpenedGroup,
    Sleep,
    SleepOutcome,
    TensorEntry,
    Transport,
    VersionKind,
)

MANIFEST = Manifest(
    run_id="r",
    epoch=2,
    version=0,
    kind=VersionKind.LORA,
    transport=Transport.NCCL,
    result_root=b"root",
    layout_signature=b"sig",
    tensors=(TensorEntry(name="w", dtype="bfloat16", shape=(2, 3), offset=0, num_bytes=12, digest=b"d"),),
    chunks=(),
    digest_algorithm="sum128",
    collective=CollectivePlan(num_senders=2, bucket_bytes=2**26, whole_tensors=(0,)),
    adapter=AdapterConfig(rank=8, lora_alpha=16.0, target_modules=("q_proj", "v_proj"), base_model="m"),
)
JOIN = JoinGroup(
    generation=3,
    store_address="h:1",
    backend="gloo",
    num_senders=2,
    num_receivers=6,
    first_receiver=4,
    deadline_s=30.0,
)
OPENED = OpenedGroup(generation=3, members=(GroupMember(engine_id="i", first_receiver=0, num_ranks=4),))


@pytest.mark.parametrize(
    ("value", "to_proto", "from_proto"),
    [
        (MANIFEST, convert.to_proto, None),
        (JOIN, convert.agent_command_to_proto, convert.agent_command_from_proto),
        (OPENED, convert.to_proto, None),
        (Sleep(number=3), convert.agent_command_to_proto, convert.agent_command_from_proto),
        (
            AgentReport(lease_id="l", state=AgentState.READY, sleeping=True, sleep_answered=3),
            convert.to_proto,
            None,
        ),
        (
            AgentRegistration(
                engine_id="e", url="u", transports=(Transport.STREAM,), layout_signature=b"s", can_sleep=True
            ),
            convert.to_proto,
            None,
        ),
        (
            EngineInfo(
                engine_id="e",
                url="u",
                engine_pool="",
                state=AgentState.READY,
                serving_version=1,
                routable=True,
                last_seen_s=0.5,
                sleeping=True,
                can_sleep=True,
                layout_signature=b"layout",
            ),
            convert.to_proto,
            None,
        ),
        (
            SleepOutcome(asleep=2, awake=1, seconds=0.5),
            convert.to_proto,
            None,
        ),
    ],
    ids=["manifest", "join", "opened", "sleep", "report", "registration", "engine", "outcome"],
)
def test_values_survive_the_trip(value, to_proto, from_proto):
    message = to_proto(value)
    message = type(message).FromString(message.SerializeToString())
    assert (convert.from_proto(type(value), message) if from_proto is None else from_proto(message)) == value
