"""Hooks of a user, which write down how they were called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CALLS: list[tuple[Any, ...]] = []


def discovered(index: int, run_id: str, config: Mapping[str, Any]) -> None:
    CALLS.append(("discovered", index, run_id, config["model"]["lora"]["rank"]))


def forgotten(index: int, run_id: str) -> None:
    CALLS.append(("forgotten", index, run_id))


def creation(index: int, run_id: str) -> None:
    if run_id == "bad":
        raise ValueError("bad has no place here")
    CALLS.append(("creation", index, run_id))


def deletion(index: int, run_id: str) -> None:
    CALLS.append(("deletion", index, run_id))


def config_validation(config: Mapping[str, Any]) -> tuple[bool, str]:
    rank = config.get("model", {}).get("lora", {}).get("rank")
    return rank != 13, "thirteen is refused by a hook"
