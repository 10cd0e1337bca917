"""Which way versions leave, and where their files go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.core.private_folders import SHM, versions_folder
from meshrl.trainer.publishing.build import store_host
from meshrl.trainer.publishing.transport_choice import choose, files_folder
from meshrl.wire.types import AgentState, EngineInfo, Transport

HERE = EngineInfo(
    engine_id="a",
    url="",
    engine_pool="",
    state=AgentState.READY,
    serving_version=None,
    routable=False,
    last_seen_s=0.0,
    transports=(Transport.FILESYSTEM, Transport.STREAM, Transport.NCCL),
    collective_ranks=1,
    collective_backend="nccl",
    host="here",
)
THERE = replace(HERE, engine_id="b", host="there")
ON_CPU = replace(HERE, engine_id="c", collective_backend="gloo")


@pytest.mark.parametrize(
    ("configured", "engines", "on_gpu", "adapter_only", "expected"),
    [
        ("auto", [], True, False, "filesystem"),
        ("auto", [HERE, THERE], True, False, "nccl"),
        ("auto", [HERE, THERE], False, False, "stream"),
        ("auto", [HERE, ON_CPU], True, False, "filesystem"),
        ("auto", [HERE], True, True, "filesystem"),
        ("auto", [HERE, THERE], True, True, "stream"),
        ("nccl", [], False, False, "nccl"),
        ("nccl", [HERE], True, True, "stream"),
        ("stream", [HERE], True, False, "stream"),
        ("filesystem", [THERE], True, False, "filesystem"),
    ],
)
def test_transport_follows_the_engines(
    configured: str, engines: list[EngineInfo], on_gpu: bool, adapter_only: bool, expected: str
) -> None:
    transport, _ = choose(configured, engines, on_gpu=on_gpu, host="here", adapter_only=adapter_only)
    assert transport.value == expected


def test_choice_says_which_engine_is_elsewhere() -> None:
    _, why = choose("auto", [HERE, THERE], on_gpu=False, host="here", adapter_only=False)
    assert why == "engine b is not on this host"


def folder(output_dir: Path, **changed: object) -> Path:
    fields: dict[str, object] = {
        "hub_address": "127.0.0.1:1", "engines": (HERE,), "host": "here", "one_host": True, "version_bytes": 1,
    }  # fmt: skip
    return files_folder(None, output_dir, output_dir / "broadcasts", **(fields | changed))  # type: ignore[arg-type]  # a table of fields


def test_files_lie_in_memory_only_where_everybody_is_here_and_there_is_room(tmp_path: Path) -> None:
    assert folder(tmp_path) == versions_folder(tmp_path)
    on_disk = tmp_path / "broadcasts"
    assert folder(tmp_path, hub_address="10.0.0.1:1") == on_disk
    assert folder(tmp_path, engines=(HERE, THERE)) == on_disk
    assert folder(tmp_path, one_host=False) == on_disk
    assert folder(tmp_path, version_bytes=2**60) == on_disk


def test_folders_in_memory_differ_by_output_dir(tmp_path: Path) -> None:
    assert versions_folder(tmp_path / "a") != versions_folder(tmp_path / "b")
    assert versions_folder(tmp_path).parent == SHM


@pytest.mark.parametrize(
    ("transport", "engines_host", "one_host", "expected"),
    [
        ("filesystem", "10.0.0.5", True, "127.0.0.1"),
        ("nccl", "127.0.0.1", True, "127.0.0.1"),
        ("nccl", "10.0.0.5", True, "10.0.0.5"),
        ("nccl", "10.0.0.5", False, "10.0.0.5"),
        ("nccl", "127.0.0.1", False, "node-0"),
    ],
)
def test_store_is_where_all_who_meet_there_reach_it(
    transport: str, engines_host: str, one_host: bool, expected: str
) -> None:
    assert store_host(transport, engines_host, {"MASTER_ADDR": "node-0"}, one_host=one_host) == expected
