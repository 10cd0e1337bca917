"""docs/own-service.md: its commands, in order, give a service that keeps the contract, without code of ours."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conformance_kit import verdict
from inference_kit import make_model, served
from local_ports import free_port
from meshrl.client import RolloutClient

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "own-service.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
UP_S = 120.0
FOUND = """
import json, sys
sys.path.insert(0, "gen")
from google.protobuf import json_format
from meshrl.v1 import exchange_pb2, identity_pb2, trainer_pb2, weights_pb2
source = open("service.py").read().partition("class Engine")[0]
exec(source)
found, modules = [], (pb, exchange_pb2, identity_pb2, trainer_pb2, weights_pb2)
for case in json.load(open("vectors/violations.json"))["requests"]:
    kinds = (vars(module)[case["message"]] for module in modules if case["message"] in vars(module))
    found.append(sorted({path for path, _ in violations(json_format.ParseDict(case["json"], next(kinds)()))}))
print(json.dumps(found))
"""
"""Prints the paths that protovalidate finds in each request of the vectors."""


def bash(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands before the service have run, and service.py is saved."""
    top = tmp_path_factory.mktemp("stranger")
    bash(f"{sys.executable} {ROOT}/scripts/archive_contract.py outputs", top)
    unpack, *rest = next(block for language, block in BLOCKS if language == "bash").splitlines()
    bash(unpack, top)
    folder = next(top.glob("meshrl-contract-*"))
    for command in rest:
        bash(command.replace("python -m venv", f"{sys.executable} -m venv"), folder)
    (folder / "service.py").write_text(next(block for language, block in BLOCKS if language == "python"))
    return folder


@pytest.fixture
async def service(folder: Path, tokenizer_dir: Path) -> AsyncIterator[str]:
    """The address of the service, started as the page does, on a real engine."""
    port = free_port()
    (command,) = re.findall(r"^\.venv/bin/python service.py .*$", PAGE, re.MULTILINE)
    async with served(make_model(vocab_size=99), AutoTokenizer.from_pretrained(tokenizer_dir), version=3) as engine:
        command = command.replace("50061", str(port)).replace("http://127.0.0.1:8000", engine.url)
        process = await asyncio.create_subprocess_exec(*command.split(), cwd=folder, stdin=subprocess.DEVNULL)
        async with RolloutClient(f"127.0.0.1:{port}") as client:
            await client.wait_until_serving(UP_S)
        yield f"127.0.0.1:{port}"
        process.kill()
        await asyncio.wait_for(process.wait(), UP_S)


async def test_a_service_written_by_the_page_alone_keeps_every_rule(service: str) -> None:
    broken, unchecked = await verdict(service, "rollout", full=True)
    assert broken == {}
    assert set(unchecked) == {"rollout.reattach"}  # which the page leaves out


def test_protovalidate_finds_the_same_fields_wrong_as_the_vectors(folder: Path) -> None:
    found: list[list[str]] = json.loads(bash(f".venv/bin/python - <<'END'\n{FOUND}\nEND", folder))
    cases: list[dict[str, Any]] = json.loads((folder / "vectors" / "violations.json").read_text())["requests"]
    whole = {"collective_backend": ""}  # a rule of the message, whose path is empty
    for case, paths in zip(cases, found, strict=True):
        assert paths == sorted(whole.get(path, path) for path in case["fields"]), case
