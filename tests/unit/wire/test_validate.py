"""Requests are refused at the door by the constraints of the schema, with every bad field in one answer."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass

import meshrl.v1
from meshrl.v1 import rollout_pb2
from meshrl.v1.rules import RULES
from meshrl.wire import validate
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import CONTRACT_VERSION

PROTO = Path(__file__).parents[3] / "proto"
CASES = json.loads((PROTO / "vectors" / "violations.json").read_text())["requests"]
FILES = [
    importlib.import_module(f"meshrl.v1.{path.stem}").DESCRIPTOR
    for path in sorted(Path(next(iter(meshrl.v1.__path__))).glob("*_pb2.py"))
]
MESSAGES: dict[str, Descriptor] = {name: found for file in FILES for name, found in file.message_types_by_name.items()}

BOUND = re.compile(
    r"UUID|\d+ to \d|[Aa]t (least|most) \d|[Aa]bove 0|must be positive|\(0, 1\]|, from \d|another is INVALID"
)
ELSEWHERE = {"RunRolloutsResponse", "MicroBatch", "CollectivePlan"}
"""Messages in requests that are checked where they are read, against more than themselves. A wrong rollout is a
BAD_ROLLOUT and must not end the stream that it comes in."""


def requests() -> dict[str, Descriptor]:
    """Each message that a server receives, alone or in another."""
    found: dict[str, Descriptor] = {}

    def add(message: Descriptor) -> None:
        if message.name in found or message.name in ELSEWHERE or message.file not in FILES:
            return
        found[message.name] = message
        for field in message.fields:
            if field.message_type is not None:
                add(field.message_type)

    for file in FILES:
        for service in file.services_by_name.values():
            for rpc in service.methods:
                add(rpc.input_type)
    return found


def comments() -> Iterator[tuple[str, str, str]]:
    """Message, field and comment of the protos."""
    for path in (PROTO / "meshrl").rglob("*.proto"):
        message, comment = "", ""
        for line in path.read_text().splitlines():
            if opened := re.match(r"message (\w+)", line):
                message = opened[1]
            if said := re.match(r"\s+// (.*)", line):
                comment += f" {said[1]}"
                continue
            if field := re.match(r"\s+(?:optional |repeated )?[\w.<>, ]+ (\w+) = \d+", line):
                yield message, field[1], comment
            comment = ""


def test_every_field_of_a_request_whose_comment_states_a_bound_has_a_constraint() -> None:
    received = requests()
    bounded = {(message, field) for message, field, comment in comments() if BOUND.search(comment)}
    held = {(message, field) for message, field in bounded if message in received}
    assert len(held) > 25
    assert [f"{m}.{f}" for m, f in sorted(held) if not RULES.get(f"meshrl.v1.{m}", {}).get(f)] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['message']}-{'-'.join(case['fields'])}")
def test_each_wrong_field_of_a_request_is_named(case: dict[str, Any]) -> None:
    message = ParseDict(case["json"], GetMessageClass(MESSAGES[case["message"]])())
    assert {violation.field for violation in validate.violations(message)} == set(case["fields"])


def test_the_vectors_break_every_constraint_once() -> None:
    broken = set()
    for case in CASES:
        for path in case["fields"]:
            message = MESSAGES[case["message"]]
            *outer, last = re.sub(r"\[\d+\]", "", path).split(".")
            for name in outer:
                message = message.fields_by_name[name].message_type
            broken.add((message.full_name, last if last in RULES[message.full_name] else ""))
    assert broken == {(message, field) for message, fields in RULES.items() for field in fields}


def test_the_error_has_path_rule_value_and_remedy() -> None:
    request = rollout_pb2.RunRolloutsRequest(request_id="q", group_id="g", environment="e", group_size=1)
    with pytest.raises(MeshError) as refused:
        validate.check(request)
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert str(refused.value) == (
        "INVALID_REQUEST: 3 fields are wrong in RunRolloutsRequest; request_id: must be a UUID, got 'q';"
        " deadline_s: must be above 0 and finite, got 0; task: set task_index or task_payload"
    )


def test_another_major_contract_version_is_refused_before_anything_else() -> None:
    with pytest.raises(MeshError) as refused:
        validate.check(rollout_pb2.ListEnvironmentsRequest(contract_version="2.0"))
    assert refused.value.reason is Reason.CONTRACT_MISMATCH
    assert refused.value.metadata == {"contract_version": CONTRACT_VERSION}
    for tolerated in ("1.9", ""):
        validate.check(rollout_pb2.ListEnvironmentsRequest(contract_version=tolerated))
