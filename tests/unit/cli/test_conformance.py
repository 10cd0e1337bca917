"""The rules of `meshrl conformance`: each has a check, and what scripts go by."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoints
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner

from local_ports import free_port
from meshrl.cli.main import main
from meshrl.wire.types import capabilities
from meshrl_conformance import command, publishing
from meshrl_conformance.exchange import WORKER_CHECKS, WORKER_RULES
from meshrl_conformance.probe import CHECKS
from meshrl_conformance.rules import RULES

CONTRACT = Path(__file__).parents[3] / "docs" / "contract.md"
THREE_CELLS = re.compile(r"^\| `([a-z.-]+)` \| ([^|]*) \| (.*) \|$", flags=re.MULTILINE)


def test_every_rule_has_one_check() -> None:
    assert command.MODULES
    assert CHECKS.keys() == RULES.keys()


def test_the_contract_lists_every_capability_with_the_services_that_have_it() -> None:
    listed = THREE_CELLS.findall(CONTRACT.read_text().partition("\n## Conformance\n")[0])
    services: dict[str, tuple[str, ...]] = {
        "RolloutService": capabilities.ROLLOUT,
        "TrainerService": capabilities.TRAINER,
        "WeightSync": capabilities.HUB,
        "agents of engines": (*capabilities.ENGINE, capabilities.BROADCAST_DELTAS),
    }
    expected = {
        name: {service for service, names in services.items() if name in names} for name in chain(*services.values())
    }
    assert {name: set(by.split(", ")) - {"its clients"} for name, by, _ in listed} == expected


def test_the_contract_lists_every_rule_of_workers_that_dial_in_with_its_sentence() -> None:
    listed = re.findall(r"^\| `(exchange\.(?!proto)[a-z-]+)` \| (.*) \|$", CONTRACT.read_text(), flags=re.MULTILINE)
    assert dict(listed) == WORKER_RULES
    assert WORKER_CHECKS.keys() == WORKER_RULES.keys()


def test_no_worker_that_dials_in_is_exit_code_two_and_one_line() -> None:
    address = f"127.0.0.1:{free_port()}"
    asked = ["--address", address, "--service", "exchange", "--deadline", "0.5"]
    result = CliRunner().invoke(command.conformance, asked)
    assert result.exit_code == 2
    assert result.output == (
        f"Error: no worker has dialled in at {address} within 0.5 s: start it with that exchange.address\n"
    )


def test_a_server_that_is_not_there_is_exit_code_two_and_one_line() -> None:
    address = ["--address", "127.0.0.1:1", "--service", "trainer", "--deadline", "0.5"]
    result = CliRunner().invoke(command.conformance, address)
    assert result.exit_code == 2
    assert result.output == (
        "Error: no gRPC server answers at 127.0.0.1:1 within 0.5 s: start it, or correct --address\n"
    )


def test_the_checksum_is_that_of_the_standard() -> None:
    assert publishing.crc32c(b"123456789") == 0xE3069283


def test_the_command_is_added_by_a_distribution_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = CliRunner().invoke(main, ["--help"]).output
    assert "conformance  Check a server" in listed
    monkeypatch.setattr("meshrl.cli.main.entry_points", lambda **named: EntryPoints(()))
    assert "conformance" not in CliRunner().invoke(main, ["--help"]).output
    done = CliRunner().invoke(main, ["conformance", "--address", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "pip install meshrl-conformance" in done.output
