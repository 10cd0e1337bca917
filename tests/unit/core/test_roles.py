"""Every RPC of the contract has the roles that may call it, and they make sense."""

import subprocess
import sys

import pytest

from meshrl.client.trust import Role
from meshrl.core.rpc.roles import ROLES_OF
from meshrl.v1 import access_pb2

NAMES_OF_RPCS = """
import importlib, pathlib
from google.protobuf import descriptor_pool
import meshrl.v1 as v1
for path in sorted(pathlib.Path(v1.__path__[0]).glob("*_pb2.py")):
    file = importlib.import_module(f"meshrl.v1.{path.stem}").DESCRIPTOR
    for service in file.services_by_name.values():
        for method in service.methods:
            print(f"{service.full_name}/{method.name}")
"""


def test_the_table_names_every_rpc_of_the_contract_and_no_other() -> None:
    listed = subprocess.run([sys.executable, "-c", NAMES_OF_RPCS], capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0, listed.stderr
    assert sorted(ROLES_OF) == sorted(listed.stdout.split())
    assert [method for method, roles in ROLES_OF.items() if not roles] == ["meshrl.v1.EnrollmentService/Enroll"]


def test_the_contract_and_the_credentials_have_the_same_roles() -> None:
    of_contract = {name.removeprefix("ROLE_").lower() for name in access_pb2.Role.DESCRIPTOR.values_by_name}
    assert of_contract - {"unspecified", "any"} == set(Role)


@pytest.mark.parametrize(
    ("method", "nobody_but"),
    [
        ("TrainerService/Drain", {Role.ORCHESTRATOR, Role.OPERATOR}),  # ends a run
        ("RolloutService/Drain", {Role.ORCHESTRATOR, Role.OPERATOR}),
        ("WeightSync/Drain", {Role.ORCHESTRATOR, Role.OPERATOR}),
        ("TrainerService/SuspendRun", {Role.ORCHESTRATOR, Role.OPERATOR, Role.TENANT}),
        ("TrainerService/SubmitBatch", {Role.ORCHESTRATOR, Role.TENANT}),
        ("WeightSync/CreateVersion", {Role.PUBLISHER}),  # replaces its policy
        ("WeightSync/ActivateVersion", {Role.ORCHESTRATOR, Role.OPERATOR, Role.TENANT}),
        ("RolloutService/RunRollouts", {Role.ORCHESTRATOR, Role.OPERATOR, Role.TENANT}),
    ],
)
def test_what_ends_a_run_or_changes_it_is_for_few(method: str, nobody_but: set[Role]) -> None:
    assert ROLES_OF[f"meshrl.v1.{method}"] == nobody_but


def test_a_viewer_only_looks() -> None:
    may = {method.rpartition("/")[2] for method, roles in ROLES_OF.items() if Role.VIEWER in roles}
    assert all(name.startswith(("Get", "List", "Watch", "Renew")) for name in may), may
