"""Groups, and versions that travel in one or hold an adapter, become messages and come back the same."""

import pytest

from meshrl.wire import convert
from meshrl.wire.types import (
    AdapterConfig,
    CollectivePlan,
    GroupMember,
    JoinGroup,
    Manifest,
    OpenedGroup,
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
        (MANIFEST, convert.manifest_to_proto, convert.manifest_from_proto),
        (JOIN, convert.agent_command_to_proto, convert.agent_command_from_proto),
        (OPENED, convert.opened_group_to_proto, convert.opened_group_from_proto),
    ],
    ids=["manifest", "join", "opened"],
)
def test_values_survive_the_trip(value, to_proto, from_proto):
    message = to_proto(value)
    assert from_proto(type(message).FromString(message.SerializeToString())) == value
