"""A rollout that leaves out what its server could set, or holds what nobody here reads, counts as failed."""

import numpy as np
import pytest

from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import convert, tensors
from meshrl.wire.types import Rollout, RolloutFailure
from meshrl.wire.validate import at_least


def message(**fields) -> pb.RunRolloutsResponse:
    """A rollout as a server of 1.0 sends it, whose reward is 0: neither that nor the temperature is on the wire."""
    sample = pb.Sample(
        token_ids=tensors.encode(np.array([1], dtype=np.int32)),
        loss_mask=tensors.encode(np.array([False])),
        logprobs=tensors.encode(np.zeros(1, dtype=np.float32)),
        **fields,
    )
    return pb.RunRolloutsResponse(rollout=pb.Rollout(rollout_id="r", group_id="g", samples=[sample]))


@pytest.mark.parametrize("version", ["", "1.0"])
def test_a_server_of_1_0_cannot_send_a_zero_so_absent_is_0(version):
    event = convert.RolloutReader(version).read(message())
    assert isinstance(event, Rollout)
    assert (event.reward, event.samples[0].temperature) == (0.0, 0.0)


@pytest.mark.parametrize("version", ["1.1", "1.2", "1.10"])
def test_a_later_server_has_forgotten_what_is_absent(version):
    event = convert.RolloutReader(version).read(message())
    assert isinstance(event, RolloutFailure)
    assert (event.rollout_id, event.reason) == ("r", "BAD_ROLLOUT")
    assert "reward: must be set, also where it is 0" in event.message
    assert "samples[0].temperature: must be set" in event.message


def test_a_reward_of_0_that_was_set_is_one():
    received = message(temperature=0.5)
    received.rollout.reward = 0.0
    event = convert.RolloutReader("1.1").read(received)
    assert isinstance(event, Rollout)
    assert (event.reward, event.samples[0].temperature) == (0.0, 0.5)


@pytest.mark.parametrize(
    "field",
    [{"media": [pb.Media(media_type="image/png")]}, {"advantages": tensors.encode(np.zeros(1, dtype=np.float32))}],
)
def test_what_this_program_does_not_read_is_named_and_not_ignored(field):
    event = convert.RolloutReader("1.1").read(message(temperature=1.0, **field))
    assert isinstance(event, RolloutFailure)
    assert f"samples[0].{next(iter(field))}: is not supported here" in event.message


def test_versions_are_compared_by_their_numbers():
    assert at_least("1.10", "1.9")
    assert not at_least("1.9", "1.10")
    assert not at_least("", "1.0")
    assert not at_least("one", "1.0")
