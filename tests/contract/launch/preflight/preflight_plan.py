"""A run to be checked before it starts, and what a check finds."""

from __future__ import annotations

from pathlib import Path

from meshrl.core.config import load_config
from meshrl.launch.compose import compose
from meshrl.launch.config import RLConfig
from meshrl.launch.preflight.findings import Check, Plan


def plan(*argv: str, model: Path | str = "m/m", gpus: tuple[str, ...] = ()) -> Plan:
    given = ["--orchestrator.train.env.0.id", "reverse_text", "--inference", "--model.name", str(model), *argv]
    config = load_config(RLConfig, given, prog="rl", environ={})
    chosen = iter(range(40001, 40100))
    parts = compose(config, lambda host: next(chosen), gpus=gpus)
    return Plan(config=config, parts=parts, gpus=gpus, chosen_ports=range(40001, 40100))


def found(check: Check, examined: Plan) -> list[str]:
    return [f"{finding.severity}: {finding.text}" for finding in check(examined)]
