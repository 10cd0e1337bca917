"""Turns the dataclasses of `meshrl.wire.types` into protobuf messages and back, and nothing else does.

`to_proto` takes every value that its type allows. `from_proto` raises MeshError INVALID_REQUEST with every bad field.
Bulk messages, and those of which a newer peer may send an unknown kind (then None), have functions of their own.
"""

from meshrl.wire.convert.batches import BatchReader, batch_digest, batch_to_messages, step_event_from_proto
from meshrl.wire.convert.by_annotation import from_proto, message_of, to_proto
from meshrl.wire.convert.manifests import manifest_header, manifest_of, manifest_parts, manifest_size
from meshrl.wire.convert.micro_batches import micro_batch_from_proto, micro_batch_to_proto
from meshrl.wire.convert.rollouts import (
    RolloutReader,
    rollout_event_from_proto,
    rollout_event_to_proto,
    rollout_messages,
)
from meshrl.wire.convert.weights import (
    agent_command_from_proto,
    agent_command_to_proto,
    version_event_from_proto,
    version_info_from_proto,
)
