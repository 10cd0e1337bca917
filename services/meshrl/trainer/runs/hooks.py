"""Functions of the user that are called as runs come and go: the `run_hooks` section of the trainer.

A run has an index, the smallest that is free, from its creation to its deletion. `config` is the table of
control/orch.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loguru import logger
from pydantic import Field

from meshrl.algorithms.imports import load_function
from meshrl.core.config import BaseConfig

Hook = Callable[..., Any]


class RunHooksConfig(BaseConfig):
    """Functions, as `package.module.function`, that are called as runs come and go."""

    discovered: list[str] = Field(default_factory=list)
    """(index, run_id, config), on rank 0, once a run's folder was found."""

    forgotten: list[str] = Field(default_factory=list)
    """(index, run_id), on rank 0, once a run's folder is gone."""

    creation: list[str] = Field(default_factory=list)
    """(index, run_id), on every rank, once a run is made. An error refuses the run."""

    deletion: list[str] = Field(default_factory=list)
    """(index, run_id), on every rank, before a run's memory is freed."""

    config_validation: list[str] = Field(default_factory=list)
    """(config) -> (ok, message), on rank 0, before a run is made. The message of a refusal is written to
    control/config_validation_error.txt."""


class RunHooks:
    """The hooks of one rank, and the indices of its runs."""

    def __init__(self, config: RunHooksConfig | None = None) -> None:
        """Raises ValueError, which names the key, for a function that cannot be loaded or called."""
        arguments: Mapping[str, Sequence[str]] = {
            "discovered": ("index", "run_id", "config"),
            "forgotten": ("index", "run_id"),
            "creation": ("index", "run_id"),
            "deletion": ("index", "run_id"),
            "config_validation": ("config",),
        }
        wanted = config or RunHooksConfig()
        self._hooks: dict[str, list[Hook]] = {
            kind: [
                load_function(path, {}, key=f"trainer.run_hooks.{kind}", positional=tuple(positional))
                for path in getattr(wanted, kind)
            ]
            for kind, positional in arguments.items()
        }
        self._indices: dict[str, int] = {}

    def index(self, run_id: str) -> int:
        if run_id not in self._indices:
            taken = set(self._indices.values())
            self._indices[run_id] = next(index for index in range(len(taken) + 1) if index not in taken)
        return self._indices[run_id]

    def created(self, run_id: str) -> None:
        """Raises ValueError for an error of a creation hook."""
        index = self.index(run_id)
        for hook in self._hooks["creation"]:
            try:
                hook(index, run_id)
            except Exception as error:  # whatever a user's function raises
                del self._indices[run_id]
                raise ValueError(f"a creation hook failed: {error}") from error

    def deleted(self, run_id: str) -> None:
        self._call("deletion", self._indices.pop(run_id), run_id)

    def discovered(self, run_id: str, config: Mapping[str, Any]) -> None:
        self._call("discovered", self.index(run_id), run_id, config)

    def forgotten(self, index: int, run_id: str) -> None:
        self._call("forgotten", index, run_id)

    def problem(self, config: Mapping[str, Any]) -> str | None:
        """The message of the first config_validation hook that refuses a configuration."""
        for hook in self._hooks["config_validation"]:
            try:
                valid, message = hook(config)
            except Exception as error:  # noqa: BLE001  # whatever a user's function raises
                return f"a config_validation hook failed: {error}"
            if not valid:
                return str(message)
        return None

    def _call(self, kind: str, *arguments: object) -> None:
        for hook in self._hooks[kind]:
            try:
                hook(*arguments)
            except Exception as error:  # noqa: BLE001  # a run that goes does so whatever a user's function raises
                logger.error("a {} hook failed: {}", kind, error)
