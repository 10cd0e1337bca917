"""Configurations of `rl` as its command line gives them, and the programs that they become."""

from collections.abc import Iterator
from typing import Any

import pytest

from meshrl.core.config import load_config
from meshrl.launch.compose import compose
from meshrl.launch.config import RLConfig

TRAINS = ("--orchestrator.train.env.0.id", "reverse-text")
COMPONENTS = ("rollout", "trainer", "weights", "inference", "orchestrator")


def load(*argv: str, environ: dict[str, str] | None = None) -> RLConfig:
    return load_config(RLConfig, [*TRAINS, *argv], prog="rl", environ=environ or {})


def parts_of(config: RLConfig) -> dict[str, Any]:
    """The programs by name; servers without a port get 40001, 40002 and so on."""
    ports: Iterator[int] = iter(range(40001, 40100))

    def free_port(host: str) -> int:
        return next(ports)

    return {part.name: part for part in compose(config, free_port)}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, bare: bool = False) -> str:
    """What `rl` writes of a configuration that it refuses; `bare` is one without an environment."""
    with pytest.raises(SystemExit) as leaving:
        load_config(RLConfig, [*(() if bare else TRAINS), *argv], prog="rl", environ={})
    assert leaving.value.code == 2
    return capsys.readouterr().err
