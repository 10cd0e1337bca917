"""What the hub keeps of versions that ended: enough for the answers that it owes, but no more with every version."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hub_rules import Hub, manifest
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentFault, AgentState, Manifest, Transport, VersionState

ENGINES = ("a", "b", "c")
MOST_RECORDS = 40


@pytest.fixture
def hub() -> Hub:
    made = Hub()
    for name in ENGINES:
        made.engine(name)
    return made


def goes_through(hub: Hub, version: int, engines: tuple[str, ...] = ENGINES) -> Manifest:
    """One version, from its manifest to the engines that serve it."""
    made = manifest(version % 251, transport=Transport.STREAM)
    made = Manifest(**{**vars(made), "version": version})
    hub.seal(made)
    hub.activate(version, min_ready=len(engines))
    for name in engines:
        hub.prepared(name, made, generation=0)
    for name in engines:
        hub.serves(name, made, None)
    assert hub.rules.line("run").records["run", 1, version].state is VersionState.COMMITTED
    hub.told.clear()
    hub.wait(0.1)
    return made


def work_of(function: Callable[[], object]) -> int:
    """Steps of the interpreter that a call takes: a measure that does not depend on the machine."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only where a frame asked for them before
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return steps


def test_records_rows_and_work_of_a_report_do_not_grow_with_the_number_of_versions(hub: Hub) -> None:
    works = []
    for version in range(300):
        made = goes_through(hub, version)
        if version in (99, 299):
            works.append(work_of(lambda made=made: hub.serves("b", made, None)))  # type: ignore[misc]  # bound now
        assert len(hub.rules.line("run").records) <= MOST_RECORDS
        assert hub.disk is not None
        assert hub.disk.versions.keys() == hub.rules.line("run").records.keys()
    assert 0 < works[1] <= 1.1 * works[0]


def test_a_restarted_hub_knows_what_the_one_before_knew(hub: Hub) -> None:
    for version in range(200):
        goes_through(hub, version)
    before = {key: (r.state, r.revision, r.answer) for key, r in hub.rules.line("run").records.items()}
    revision = hub.rules.revision
    hub.restart()
    assert hub.rules.revision == revision
    after = {key: (r.state, r.revision, r.answer) for key, r in hub.rules.line("run").records.items()}
    assert after == before
    assert {("run", 1, version) for version in range(170, 200)} <= after.keys()


def test_versions_that_ended_lately_get_their_first_answer_and_older_ones_are_unknown(hub: Hub) -> None:
    for version in range(200):
        goes_through(hub, version)
    for _ in range(2):  # by this hub, and by the one that comes after it
        first = hub.rules.line("run").records["run", 1, 190].answer
        assert first is not None
        hub.answers.clear()
        hub.activate(190)
        assert hub.answers == [first]
        with pytest.raises(MeshError, match="version 5 is unknown, or ended long ago") as caught:
            hub.activate(5)
        assert caught.value.reason is Reason.UNKNOWN_VERSION
        hub.restart()


def test_a_group_request_gets_its_first_answer_from_a_restarted_hub(hub: Hub) -> None:
    opened = hub.open(request_id="the one")
    for version in range(200):
        goes_through(hub, version)
    hub.restart()
    assert hub.open(request_id="the one") == opened


def test_an_engine_stays_routable_with_the_old_version_that_it_serves(hub: Hub) -> None:
    made = goes_through(hub, 0)
    for version in range(1, 200):
        goes_through(hub, version, ("a", "b"))
        hub.serves("c", made, None)  # it has refused every version since
    info = hub.rules.engines("", hub.now_s)[2]
    assert info.engine_id == "c"
    assert (info.serving_version, info.routable) == (0, True)


def test_what_an_engine_refused_is_forgotten_with_the_versions(hub: Hub) -> None:
    fault = AgentFault(reason="LAYOUT_MISMATCH", message="another model")
    for version in range(300):
        made = manifest(version % 251, transport=Transport.STREAM)
        made = Manifest(**{**vars(made), "version": version})
        artifact = hub.seal(made)
        hub.activate(version, min_ready=2)
        hub.say("c", AgentState.JOINING, target_version=version, target_artifact_id=artifact, fault=fault)
        for name in ("a", "b"):
            hub.prepared(name, made, generation=0)
        for name in ("a", "b"):
            hub.serves(name, made, None)
        hub.wait(0.1)
        hub.say("c")
    assert len(hub.rules.pool.engines["c"].on("run").faulted) <= MOST_RECORDS
