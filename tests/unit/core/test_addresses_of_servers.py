"""An address without a port, or with one that no server has, is refused before anything calls it."""

from __future__ import annotations

import pytest

from meshrl.core.config import load_config
from meshrl.inference.config import InferenceConfig
from meshrl.machine.addresses import checked_address
from meshrl.orchestrator.config import OrchestratorConfig


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:50051", "hub.example.org:65535", "unix:/run/hub.sock"])
def test_addresses_that_can_be_called(address: str) -> None:
    assert checked_address(address) == address


@pytest.mark.parametrize(
    "address", ["", "hub", "hub:", ":50051", "hub:name", "hub:0", "hub:65536", "::1:50051", "http://hub:50051", "a b:1"]
)
def test_addresses_that_would_be_called_at_another_port_or_not_at_all(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT with a port from 1 to 65535, such as .*, got "):
        checked_address(address)


def test_the_key_and_the_place_of_a_wrong_address_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--services.trainer", "hub", "--services.rollout", "a:1,b"]
    with pytest.raises(SystemExit):
        load_config(OrchestratorConfig, flags, prog="orchestrator", environ={})
    expected = "expected HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:50051, got"
    assert capsys.readouterr().err.splitlines()[1:3] == [
        f"  services.rollout.1: {expected} 'b' (from --services.rollout)",
        f"  services.trainer: {expected} 'hub' (from --services.trainer)",
    ]
    with pytest.raises(SystemExit):
        load_config(InferenceConfig, ["--weight-broadcast.address", "hub"], prog="inference", environ={})
    assert f"weight_broadcast.address: {expected} 'hub'" in capsys.readouterr().err
