"""Requests that name a run, and lists of runs in answers, are checked against the patterns of their caller."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from meshrl.client.trust import Role, Scope, TrustFile
from meshrl.core.rpc.roles import LISTS_OF, PATHS_OF, ROLES_OF, check_runs, hide_runs
from meshrl.v1 import exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire.errors import MeshError, Reason

PATTERNS = ("team-a-*",)
LISTS_OF_RUNS = {"served"}
"""Repeated messages with a run in each: what an engine holds, which agents alone report."""


def named_in(message: Descriptor, above: tuple[str, ...] = ()) -> set[str]:
    """Every place of a `run_id`, found without the code under test."""
    found: set[str] = set()
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_STRING and field.name == "run_id":
            found.add(field.name)
        kind = field.message_type
        if kind is not None and kind.full_name not in above and field.name not in LISTS_OF_RUNS:
            found |= {f"{field.name}.{path}" for path in named_in(kind, (*above, message.full_name))}
    return found


def test_every_place_of_every_request_that_names_a_run_is_checked() -> None:
    modules = (exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    found = {f"{service.full_name}/{method.name}": method for service in services for method in service.methods}
    assert PATHS_OF.keys() == found.keys() == ROLES_OF.keys()
    for name, method in found.items():
        places = {place for place in named_in(method.input_type) if not place.startswith("rollout.")}
        assert places <= set(PATHS_OF[name]) | {"event.run_id"}, name
    assert sum(bool(paths) for paths in PATHS_OF.values()) >= 15


def test_every_call_that_a_tenant_may_make_and_that_changes_a_run_names_it() -> None:
    reads = {"GetTrainer", "ListRuns", "ListEnvironments", "GetRolloutStatus", "ListEngines", "ListRevoked", "Renew"}
    own = {name for name, roles in ROLES_OF.items() if Role.TENANT in roles and name.rpartition("/")[2] not in reads}
    assert {name.rpartition("/")[2] for name in own} >= {"CreateRun", "DeleteRun", "SubmitBatch", "RunRollouts"}
    changes = {name for name in own if not PATHS_OF[name]}
    assert not {name for name in changes if "Watch" not in name}


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Trainer/DeleteRun", trainer_pb2.DeleteRunRequest(run_id="team-b-1")),
        ("Trainer/DeleteRun", trainer_pb2.DeleteRunRequest()),  # it would be the trainer's own
        ("WeightSync/ActivateVersion", weights_pb2.ActivateVersionRequest(run_id="team-b-1")),
        ("RolloutService/RunRollouts", rollout_pb2.RunRolloutsRequest(run_id="TEAM-A-1")),
        ("Trainer/CreateRun", trainer_pb2.CreateRunRequest(
            run_id="team-a-1", spec={"start_from": {"run_id": "team-b-1"}})),
        ("WeightSync/CreateVersion", weights_pb2.CreateVersionRequest(
            manifest={"run_id": "team-b-1"}).SerializeToString()),
    ],
)  # fmt: skip
def test_another_teams_run_is_refused(method: str, request_: object) -> None:
    name = next(each for each in PATHS_OF if each.endswith(method) or method.split("/")[1] == each.rpartition("/")[2])
    with pytest.raises(MeshError, match=r"tenant/x may use the runs team-a-\*, and .* names ") as refused:
        check_runs("tenant/x", PATTERNS, name, request_)
    assert refused.value.reason is Reason.PERMISSION_DENIED
    check_runs("operator/y", (), name, request_)  # one without patterns may name all


def test_own_runs_and_later_messages_of_a_stream_pass() -> None:
    submit = next(name for name in PATHS_OF if name.endswith("/SubmitBatch"))
    create = next(name for name in PATHS_OF if name.endswith("/CreateRun"))
    check_runs("t", PATTERNS, submit, trainer_pb2.SubmitBatchRequest(header={"run_id": "team-a-1"}))
    check_runs("t", PATTERNS, submit, trainer_pb2.SubmitBatchRequest())
    spec = {"start_from": {"with_optimizer": True}}
    check_runs("t", PATTERNS, create, trainer_pb2.CreateRunRequest(run_id="team-a-1", spec=spec))


def test_patterns_go_from_the_token_to_its_bearer_and_to_members_that_came_by_it(tmp_path: Path) -> None:
    file = TrustFile(tmp_path / "trust.sqlite")
    file.create()
    with pytest.raises(ValueError, match="a tenant has runs of its own; name them with --runs"):
        file.add_token(Role.TENANT)
    token = file.add_token(Role.TENANT, runs=PATTERNS, max_runs=2, tokens_per_day=1000)
    other = file.add_token(Role.ROLLOUT)
    file.enroll(token, "alice", "key", ())
    file.enroll(other, "bob", "key", ())
    trust = file.read()
    assert trust.tokens[token.partition(".")[0]].scope.runs == PATTERNS
    assert trust.came_by["tenant", "alice"].scope == Scope(runs=PATTERNS, max_runs=2, tokens_per_day=1000)
    assert trust.came_by["rollout", "bob"].scope == Scope()


def lists_of_runs(message: Descriptor, above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Every list whose entries name a run, found without the code under test."""
    found: set[tuple[str, ...]] = set()
    for field in message.fields:
        kind = field.message_type
        if kind is not None and kind.full_name not in above:
            if field.is_repeated and any(each.name == "run_id" for each in kind.fields):
                found.add((field.name,))
            else:
                found |= {(field.name, *path) for path in lists_of_runs(kind, (*above, message.full_name))}
    return found


def test_every_list_of_every_answer_that_names_runs_is_filtered() -> None:
    modules = (exchange_pb2, identity_pb2, rollout_pb2, trainer_pb2, weights_pb2)
    methods = {
        f"{service.full_name}/{method.name}": method
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    found = {name: lists_of_runs(method.output_type) for name, method in methods.items()}
    assert {name: set(paths) for name, paths in LISTS_OF.items()} == found
    with_lists = {name.rpartition("/")[2] for name, paths in found.items() if paths}
    assert with_lists >= {"GetTrainer", "ListRuns", "ListCheckpoints", "ListEngines", "GetRolloutStatus", "ListWorkers"}
    assert not [name for name, paths in found.items() if paths and methods[name].server_streaming]


def test_the_lists_of_an_answer_lack_the_runs_of_others() -> None:
    name = next(each for each in LISTS_OF if each.endswith("TrainerService/GetTrainer"))
    runs = [{"run_id": each} for each in ("main", "team-a-1", "team-b-1", "team-a-2")]
    answer = trainer_pb2.GetTrainerResponse(runs=runs, model="m")
    hide_runs((), name, answer)
    assert len(answer.runs) == 4
    hide_runs(PATTERNS, name, answer)
    assert [run.run_id for run in answer.runs] == ["team-a-1", "team-a-2"]
    assert answer.model == "m"
    engines = next(each for each in LISTS_OF if each.endswith("WeightSync/ListEngines"))
    served = [{"run_id": "team-b-1", "version": 3}, {"run_id": "team-a-1", "version": 5}]
    listed = weights_pb2.ListEnginesResponse(engines=[{"served": served}, {}])
    hide_runs(PATTERNS, engines, listed)
    assert [[each.version for each in engine.served] for engine in listed.engines] == [[5], []]
