"""Merges layers of values: pydantic-settings orders them, `merge` says what lists and unions mean in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import Kind, Path
from meshrl.core.config.values import assign, by_place, is_indexed


@dataclass(kw_only=True)
class Layer:
    """Values from one place: a file, the environment, the command line."""

    origin: str
    """Name of the place for error messages."""

    values: dict[str, Any] = field(default_factory=dict)

    exact: dict[Path, str] = field(default_factory=dict)
    """More exact places of single values: a flag, a variable."""

    def put(self, path: Path, value: Any, origin: str) -> None:
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

    def __call__(self) -> dict[str, Any]:
        """The layer under those above it, which `current_state` holds."""
        merged: dict[str, Any] = merge(self._kind, self._layer.values, self.current_state)
        return merged


def merge_layers(kind: Kind, layers: Sequence[Layer]) -> dict[str, Any]:
    """Merges canonical layers key by key, the last winning. Raises ConfigError when a list has gaps."""

    class Merged(BaseSettings):
        model_config = SettingsConfigDict(extra="allow", protected_namespaces=())

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: object, **__: object
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(LayerSource(settings_cls, kind, layer) for layer in reversed(layers))

    merged: dict[str, Any] = _with_lists(kind, Merged().model_extra or {}, ())
    return merged


def merge(kind: Kind, lower: Any, upper: Any) -> Any:
    """`upper` over `lower`, key by key. A list replaces a list, but entries addressed by place change single ones;
    a section whose type is chosen anew loses the keys of the type before."""
    if isinstance(lower, list) and kind.item is not None and is_indexed(upper):
        lower = by_place(lower)
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    chooser = kind.discriminator
    if chooser is not None and chooser in upper and lower.get(chooser, upper[chooser]) != upper[chooser]:
        return upper
    kind, merged = kind.narrowed(upper), dict(lower)
    for key, value in upper.items():
        found = kind.step(key)
        merged[key] = value if found is None or key not in lower else merge(found[1], lower[key], value)
    return merged


def _with_lists(kind: Kind, value: Any, where: Path) -> Any:
    """Merged layers with entries addressed by place turned back into lists. Raises ConfigError on a gap."""
    if kind.item is not None:
        if is_indexed(value):
            places = sorted(int(place) for place in value)
            gap = next((place for place in range(len(places)) if place not in places), None)
            if gap is not None:
                name = ".".join(where)
                raise ConfigError(
                    f"{name}.{places[-1]} is set but {name}.{gap} is not; places of a list start at 0 and leave no gap"
                )
            value = [value[str(place)] for place in places]
        if isinstance(value, list):
            return [_with_lists(kind.item, item, (*where, str(place))) for place, item in enumerate(value)]
    if not kind.sections or not isinstance(value, Mapping):
        return value
    kind = kind.narrowed(value)
    steps = ((key, item, kind.step(key)) for key, item in value.items())
    return {key: item if step is None else _with_lists(step[1], item, (*where, key)) for key, item, step in steps}
