"""The base class of every configuration section, and the error for a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from meshrl.core.config.layers import Layer
from meshrl.core.config.schema import Path, ReadTable, Table


class ConfigError(Exception):
    """The message names the expected value, the actual value and the remedy."""


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


class BaseConfig(BaseModel):
    """Immutable; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
    )

    everyday_keys: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Groups of dotted keys for --help. Empty if it shows every key."""

    _notes: tuple[str, ...] = PrivateAttr(default=())

    _origin_of: Callable[[Path], str | None] | None = PrivateAttr(default=None)

    def origin_of(self, path: Path) -> str | None:
        """The flag, variable, or file and line that gave a key."""
        return None if self._origin_of is None else self._origin_of(path)

    @property
    def notes(self) -> tuple[str, ...]:
        """On how its keys were written, for the program's log."""
        return self._notes

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @classmethod
    def hand_down(cls, layers: Sequence[Layer]) -> None:
        """Copies shared keys of each layer to where they are used, before layers are merged."""

    @classmethod
    def complete(cls, values: ReadTable) -> Table:
        return dict(values)

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, values: object) -> object:
        """Completes a section from its own default: with only `server.host` given, a default port stays."""
        if not isinstance(values, Mapping):
            return values
        defaults = {
            name: cls.model_fields[name].get_default(call_default_factory=True)
            for name in values.keys() & cls.model_fields.keys()
        }
        return {name: _over(defaults.get(name), value) for name, value in values.items()}


def _over(default: object, value: object) -> object:
    if not isinstance(value, Mapping) or not isinstance(default, BaseModel):
        return value
    given: dict[str, object] = {name: getattr(default, name) for name in default.model_fields_set}
    return given | {name: _over(given.get(name), own) for name, own in value.items()}
