"""Layers of values, one from each place that has a say; pydantic-settings merges them in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from meshrl.core.config.schema import Kind, Path, Table
from meshrl.core.config.values import assign, by_place, merge, with_lists


@dataclass(kw_only=True)
class Layer:
    """Values from one place: a file, the environment, the command line."""

    origin: str
    """Name of the place for error messages."""

    values: Table = field(default_factory=dict)

    exact: dict[Path, str] = field(default_factory=dict)
    """More exact places of single values: a flag, a variable."""

    def put(self, path: Path, value: object, origin: str) -> None:
        """Sets one key and remembers the flag or variable that it came from."""
        assign(self.values, path, value)
        self.exact[path] = origin

    def origin_of(self, path: Path) -> str | None:
        """Where this layer has a value from, as exactly as it is known; None where it has none."""
        value: Any = self.values
        for part in path:
            value = by_place(value) if isinstance(value, list) else value
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        above = (path[:end] for end in range(len(path), 0, -1))
        return next((self.exact[each] for each in above if each in self.exact), self.origin)


class LayerSource(PydanticBaseSettingsSource):
    """A source of settings that holds one layer."""

    def __init__(self, settings: type[BaseSettings], kind: Kind, layer: Layer) -> None:
        super().__init__(settings)
        self._kind = kind
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One top-level value of the layer."""
        return self._layer.values.get(field_name), field_name, False

    def __call__(self) -> Table:
        """The layer under those above it, which `current_state` holds."""
        merged: Table = merge(self._kind, self._layer.values, self.current_state)
        return merged


def merge_layers(kind: Kind, layers: Sequence[Layer]) -> Table:
    """Merges layers key by key, the last winning. Raises ConfigError when a list has gaps."""

    class Merged(BaseSettings):
        model_config = SettingsConfigDict(extra="allow", protected_namespaces=())

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: object, **__: object
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(LayerSource(settings_cls, kind, layer) for layer in reversed(layers))

    merged: Table = with_lists(kind, Merged().model_extra or {})
    return merged
