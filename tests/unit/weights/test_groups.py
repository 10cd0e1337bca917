"""Groups for the nccl transport at the hub: who is asked to join, who is told about which version."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hub_rules import BOTH, Hub, copy_of, manifest
from meshrl.weights.coordinator.states import DeleteBytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id
from meshrl.wire.types import (
    Activation,
    AgentFault,
    AgentState,
    Commit,
    GroupMember,
    JoinGroup,
    Manifest,
    OpenedGroup,
    Prepare,
    Transport,
    VersionState,
)

BROKEN = AgentFault(reason="GROUP_BROKEN", message="rank 0 is gone")


@pytest.fixture
def hub() -> Hub:
    return Hub()


def prepare(made: Manifest) -> Prepare:
    return Prepare(version=made.version, artifact_id=artifact_id(made), run_id=made.run_id, epoch=made.epoch)


def commit(made: Manifest) -> Commit:
    return Commit(version=made.version, artifact_id=artifact_id(made), run_id=made.run_id, epoch=made.epoch)


def refusal(hub: Hub, **more: Any) -> MeshError:
    with pytest.raises(MeshError) as caught:
        hub.open(**more)
    return caught.value


class TestOpening:
    def test_ranks_are_numbered_in_order_of_registration_and_engines_are_told(self, hub: Hub) -> None:
        hub.engine("a", ranks=2)
        hub.engine("b", ranks=4)
        opened = hub.open(num_senders=3)
        assert opened == OpenedGroup(
            generation=1,
            members=(
                GroupMember(engine_id="a", first_receiver=0, num_ranks=2),
                GroupMember(engine_id="b", first_receiver=2, num_ranks=4),
            ),
        )
        assert hub.heard("b") == [
            JoinGroup(
                generation=1,
                store_address="h:1",
                backend="gloo",
                num_senders=3,
                num_receivers=6,
                first_receiver=2,
                deadline_s=30.0,
            )
        ]

    def test_only_connected_engines_with_ranks_and_the_same_backend_take_part(self, hub: Hub) -> None:
        hub.engine("other", backend="nccl")
        hub.engine("none", ranks=0, backend="")
        hub.engine("streams", transports=(Transport.STREAM,))
        hub.engine("away", connected=False)
        error = refusal(hub)
        assert error.reason is Reason.GROUP_BROKEN
        assert error.retry_after_s == 1.0
        assert error.message == (
            "no engine can join a group with backend gloo: other has backend nccl; none brings no ranks; "
            "streams brings no ranks; away has no session"
        )
        hub.engine("fits")
        assert [member.engine_id for member in hub.open().members] == ["fits"]

    def test_engines_can_be_named_or_left_out(self, hub: Hub) -> None:
        for engine_id in ("a", "b", "c"):
            hub.engine(engine_id)
        assert [m.engine_id for m in hub.open(engine_ids=("c", "a"), without=("a",)).members] == ["c"]
        assert [m.engine_id for m in hub.open(without=("b",)).members] == ["a", "c"]

    def test_an_empty_hub_says_so(self, hub: Hub) -> None:
        assert "no engine is registered" in refusal(hub).message

    def test_the_same_request_gets_the_first_answer_and_tells_nobody_again(self, hub: Hub) -> None:
        hub.engine("a")
        first = hub.open(request_id="same")
        hub.engine("b")
        hub.heard("a")
        assert hub.open(request_id="same") == first
        assert hub.told == {}
        hub.restart()
        assert hub.open(request_id="same") == first

    def test_generations_never_repeat(self, hub: Hub) -> None:
        hub.engine("a")
        assert [hub.open().generation, hub.open().generation] == [1, 2]
        hub.restart()
        hub.engine("a")
        assert hub.open().generation == 3
        hub.disk = None  # the log was moved away
        hub.restart()
        hub.engine("a", group_generation=7)
        assert hub.open().generation == 8

    def test_an_older_trainer_is_refused_and_a_newer_one_takes_over(self, hub: Hub) -> None:
        hub.engine("a")
        hub.open(epoch=2)
        stale = refusal(hub, epoch=1)
        assert stale.reason is Reason.STALE_EPOCH
        assert str(stale).endswith("or this one lost its file trainer_epoch and needs 2 in it")
        assert refusal(hub, epoch=2, run_id="other").reason is Reason.RUN_LIMIT_REACHED
        made = manifest(0, epoch=2)
        hub.seal(made)
        hub.open(epoch=3)
        assert hub.rules.line("run").records["run", 2, 0].state is VersionState.ABORTED

    def test_a_new_session_is_told_again_while_there_is_time(self, hub: Hub) -> None:
        hub.engine("a")
        hub.open()
        (told,) = hub.heard("a")
        hub.say("a")
        assert hub.heard("a") == []
        hub.now_s += 5.0
        hub.engine("a")
        assert hub.heard("a") == [told]
        hub.restart()
        hub.engine("a")
        assert hub.heard("a") == [told]
        hub.engine("a", group_generation=1)  # it is in
        assert hub.heard("a") == []
        hub.now_s += 30.0
        hub.engine("a")
        assert hub.heard("a") == []

    def test_an_engine_that_came_back_with_other_ranks_is_not_told_again(self, hub: Hub) -> None:
        hub.engine("a", ranks=2)
        hub.open()
        hub.heard("a")
        hub.engine("a", ranks=1)
        assert hub.heard("a") == []


class TestPreparing:
    def test_only_engines_in_the_current_generation_prepare(self, hub: Hub) -> None:
        for engine_id in ("in", "late", "streams"):
            hub.engine(engine_id, transports=(Transport.STREAM,) if engine_id == "streams" else BOTH)
        hub.open()
        hub.told.clear()
        hub.say("in", group_generation=1)
        made = manifest(0)
        hub.seal(made)
        assert hub.told == {"in": [prepare(made)]}
        hub.heard("in")
        hub.say("late", group_generation=1)
        assert hub.told == {"late": [prepare(made)]}

    def test_versions_of_other_transports_go_to_who_takes_them(self, hub: Hub) -> None:
        hub.engine("streams", ranks=0, transports=(Transport.STREAM,))
        hub.engine("files", ranks=0, transports=(Transport.FILESYSTEM,))
        made = manifest(0, transport=Transport.STREAM)
        hub.seal(made)
        assert hub.told == {"streams": [prepare(made)]}
        hub.activate(0)
        hub.told.clear()
        hub.say("streams", AgentState.PREPARED, target_version=0)
        assert hub.told == {"streams": [commit(made)]}  # decided without the one that cannot have it

    def test_a_version_that_was_missed_is_prepared_once_its_copy_is_here(self, hub: Hub) -> None:
        hub.engine("a")
        hub.open()
        made = manifest(0)
        hub.seal(made)
        hub.say("a", group_generation=1)
        hub.told.clear()
        hub.say("a", target_version=0, fault=BROKEN)
        hub.wait(5.0)
        hub.open()
        hub.say("a", group_generation=2)
        assert [command for command in hub.heard("a") if not isinstance(command, JoinGroup)] == []
        hub.copy(made)
        assert hub.heard("a") == [prepare(made)]

    def test_only_the_same_tensors_are_a_copy_and_only_of_a_version_that_is_broadcast(self, hub: Hub) -> None:
        made, streamed = manifest(0), manifest(1, transport=Transport.STREAM)
        for known, copy in ((made, copy_of(replace(made, result_root=b"other"))), (streamed, copy_of(streamed))):
            hub.seal(known)
            with pytest.raises(MeshError) as caught:
                hub.rules.stage(copy, artifact_id(replace(copy, codec="other")))
            assert caught.value.reason is Reason.VERSION_CONFLICT
        staged = manifest(2)
        hub.rules.stage(staged, artifact_id(staged))
        with pytest.raises(MeshError) as caught:
            hub.rules.stage(copy_of(staged), artifact_id(copy_of(staged)))
        assert caught.value.reason is Reason.VERSION_CONFLICT

    def test_a_copy_outlives_the_hub_and_goes_with_its_version(self, hub: Hub) -> None:
        hub.engine("a", group_generation=None)
        made = manifest(0)
        hub.seal(made)
        hub.copy(made)
        assert hub.heard("a") == [prepare(made)]
        hub.restart()
        hub.engine("a")
        assert hub.heard("a") == [prepare(made)]
        record = hub.rules.by_artifact(artifact_id(copy_of(made)))
        assert record.artifact_id == artifact_id(made)
        deleted: list[str] = []
        _, actions = hub.rules.line("run").abort(epoch=1, version=0, artifact_id="", message="", now_s=hub.now_s)
        deleted += [action.artifact_id for action in actions if isinstance(action, DeleteBytes)]
        assert deleted == [artifact_id(made), artifact_id(copy_of(made))]

    def test_a_group_that_was_not_joined_says_nothing_about_what_is_prepared_or_fetched(self, hub: Hub) -> None:
        hub.engine("a")
        stream = manifest(0, transport=Transport.STREAM)
        hub.seal(stream)
        hub.told.clear()
        hub.say("a", AgentState.SEEDING, target_version=0, fault=BROKEN)
        hub.say("a", AgentState.PREPARED, target_version=0, fault=BROKEN)
        hub.activate(0)
        assert hub.heard("a") == [commit(stream)]

    def test_a_group_does_not_bring_what_is_sealed_already(self, hub: Hub) -> None:
        """In a group that was opened for the next version, whoever waits for an older one takes the next for it."""
        hub.engine("a")
        hub.open()
        hub.say("a", group_generation=1)
        made = manifest(0)
        hub.seal(made)
        hub.prepared("a", made, 1)
        hub.activate(0)
        hub.serves("a", made, 1)
        hub.engine("late")
        hub.open(engine_ids=("late",))
        hub.told.clear()
        hub.say("late", group_generation=2)
        assert hub.told == {}
        hub.copy(made)
        assert hub.told == {"late": [commit(made)]}

    def test_a_later_epoch_brings_only_its_own_versions(self, hub: Hub) -> None:
        hub.engine("a")
        hub.open()
        hub.say("a", group_generation=1)
        old = manifest(3)
        hub.seal(old)
        hub.prepared("a", old, 1)
        hub.activate(3)
        hub.engine("late")
        hub.open(epoch=2, engine_ids=("late",))
        hub.told.clear()
        hub.say("late", group_generation=2)
        assert hub.told == {}
        new = manifest(3, epoch=2)
        hub.seal(new)
        assert hub.heard("late") == [prepare(new)]


class TestDeciding:
    def two_in_a_group(self, hub: Hub) -> Manifest:
        hub.engine("a")
        hub.engine("b")
        hub.open()
        hub.say("a", group_generation=1)
        hub.say("b", group_generation=1)
        made = manifest(0)
        hub.seal(made)
        hub.activate(0)
        hub.told.clear()
        return made

    def test_every_engine_of_the_group_must_have_prepared(self, hub: Hub) -> None:
        made = self.two_in_a_group(hub)
        hub.prepared("a", made, 1)
        assert hub.told == {}
        hub.prepared("b", made, 1)
        assert hub.told == {"a": [commit(made)], "b": [commit(made)]}

    def test_engines_outside_are_not_waited_for(self, hub: Hub) -> None:
        made = self.two_in_a_group(hub)
        hub.say("b", group_generation=None)
        hub.prepared("a", made, 1)
        hub.serves("a", made, 1)
        (answer,) = hub.answers
        assert isinstance(answer, Activation)
        assert [report.engine_id for report in answer.engines] == ["a"]
        assert hub.heard("b") == []

    def test_a_broken_transfer_ends_no_wait_and_the_copy_brings_it(self, hub: Hub) -> None:
        made = self.two_in_a_group(hub)
        for engine_id in ("a", "b"):
            hub.say(engine_id, target_version=0, fault=BROKEN)
        assert hub.answers == []
        assert hub.told == {}
        hub.copy(made)
        for engine_id in ("a", "b"):
            assert hub.heard(engine_id) == [prepare(made)]
            hub.say(engine_id, AgentState.PREPARED, target_version=0, target_artifact_id=artifact_id(made))
        assert hub.told == {"a": [commit(made)], "b": [commit(made)]}

    def test_a_version_that_does_not_fit_is_refused_at_once(self, hub: Hub) -> None:
        self.two_in_a_group(hub)
        fault = AgentFault(reason="LAYOUT_MISMATCH", message="another model")
        hub.say("b", target_version=0, fault=fault, group_generation=1)
        (answer,) = hub.answers
        assert isinstance(answer, MeshError)
        assert answer.metadata == {"b": "LAYOUT_MISMATCH"}
        hub.activate(0)  # nobody sends it again in this group
        assert isinstance(hub.answers[-1], MeshError)
        assert hub.heard("b") == []

    def test_a_wait_that_ends_says_who_is_outside(self, hub: Hub) -> None:
        self.two_in_a_group(hub)
        hub.say("b", target_version=0, fault=BROKEN, group_generation=None)
        for _ in range(3):
            hub.wait(8.0)
            hub.say("a", group_generation=1)
            hub.say("b", group_generation=None)
        answer = hub.answers[-1]
        assert isinstance(answer, MeshError)
        assert answer.reason is Reason.ENGINES_NOT_READY
        assert "b refused it (GROUP_BROKEN: rank 0 is gone)" in answer.message

    def test_min_ready_waits_for_engines_that_are_outside(self, hub: Hub) -> None:
        hub.engine("a")
        hub.engine("b")
        hub.open(without=("b",))
        hub.say("a", group_generation=1)
        made = manifest(0)
        hub.seal(made)
        hub.activate(0, min_ready=2)
        hub.prepared("a", made, 1)
        assert hub.rules.line("run").records["run", 1, 0].state is VersionState.SEALED
        hub.copy(made)
        assert hub.heard("b") == [prepare(made)]
        hub.say("b", AgentState.PREPARED, target_version=0, target_artifact_id=artifact_id(made))
        assert hub.heard("a")[-1] == commit(made)

    def test_a_version_that_nobody_has_is_given_up_for_the_newer_one_that_is_copied(self, hub: Hub) -> None:
        """The only engine restarts while two versions are on their way; the trainer copies the newest."""
        hub.engine("a")
        hub.open()
        hub.say("a", group_generation=1)
        made, newer = manifest(0), manifest(1)
        hub.seal(made)
        hub.activate(0)
        hub.engine("a")
        hub.seal(newer)
        assert hub.answers == []
        hub.copy(newer)
        (answer,) = hub.answers
        assert isinstance(answer, MeshError)
        assert answer.reason is Reason.ENGINES_NOT_READY
        assert "it is not in group 1" in answer.message
        hub.say("a", AgentState.PREPARED, target_version=1, target_artifact_id=artifact_id(newer))
        hub.told.clear()
        hub.activate(1)
        assert hub.heard("a") == [commit(newer)]

    def test_a_report_of_another_epochs_artifact_is_not_taken_for_this_ones(self, hub: Hub) -> None:
        hub.engine("a")
        old, new = manifest(3, transport=Transport.STREAM), manifest(3, epoch=2, transport=Transport.STREAM)
        hub.seal(old)
        hub.seal(new)
        hub.activate(3)
        hub.told.clear()
        about_old = {"target_version": 3, "target_artifact_id": artifact_id(old)}
        hub.say("a", AgentState.PREPARED, **about_old)
        assert hub.rules.line("run").records["run", 2, 3].state is VersionState.SEALED
        hub.say("a", AgentState.SEEDING, fault=AgentFault(reason="DIGEST_MISMATCH", message=""), **about_old)
        assert hub.answers == []
        hub.say("a", AgentState.PREPARED, target_version=3, target_artifact_id=artifact_id(new))
        assert hub.heard("a") == [commit(new)]


def test_the_pool_lists_what_engines_bring_and_routes_only_to_live_sound_ones(hub: Hub) -> None:
    made = manifest(0, transport=Transport.STREAM)
    for engine_id in ("sound", "silent", "poisoned", "ejected", "empty"):
        hub.engine(engine_id, ranks=2)
    hub.seal(made)
    for engine_id in ("sound", "silent", "poisoned", "ejected"):
        hub.say(engine_id, AgentState.PREPARED, target_version=0)
    hub.say("empty", AgentState.SEEDING, target_version=0)
    hub.activate(0, min_ready=1)
    for engine_id in ("sound", "silent", "poisoned"):
        hub.serves(engine_id, made, None)
    hub.now_s += 8.0
    torn = AgentFault(reason="ENGINE_FAILED", message="torn")
    hub.say("poisoned", AgentState.POISONED, fault=torn)
    hub.say("ejected", AgentState.READY, target_version=0, fault=torn)
    hub.say("empty", AgentState.JOINING)
    hub.say("sound", AgentState.READY, serving_version=0, group_generation=4)
    hub.now_s += 5.0  # the silent one's lease is over, though no tick has come
    infos = hub.rules.engines("", hub.now_s)
    assert {info.engine_id: info.routable for info in infos} == {
        "sound": True,
        "silent": False,
        "poisoned": False,
        "ejected": False,
        "empty": False,
    }
    sound = infos[0]
    assert (sound.transports, sound.collective_ranks, sound.collective_backend) == (BOTH, 2, "gloo")
    assert (sound.group_generation, sound.host) == (4, "here")
