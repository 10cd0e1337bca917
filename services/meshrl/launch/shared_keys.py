"""Which keys of `rl` its components share, and how one layer of configuration hands them down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

COMPONENTS = ("rollout", "trainer", "weights", "inference", "orchestrator")

HANDED_DOWN: Mapping[str, tuple[str, ...]] = {
    "output_dir": tuple(f"{name}.output_dir" for name in COMPONENTS),
    "log": tuple(f"{name}.log" for name in COMPONENTS),
    "model": ("trainer.model", "inference.model", "rollout.model"),
    "seq_len": ("trainer.seq_len", "orchestrator.seq_len", "rollout.seq_len", "inference.max_model_len"),
    "max_steps": ("trainer.max_steps", "orchestrator.max_steps"),
    "max_async_level": ("orchestrator.max_async_level",),
    "seed": ("trainer.seed", "orchestrator.seed", "inference.seed"),
    "run_id": ("trainer.run_id", "orchestrator.run_id"),
    "ckpt": ("trainer.ckpt",),
    "deployment.num_train_gpus": ("trainer.deployment.num_train_gpus",),
    "wandb": ("orchestrator.wandb",),
    "weight_broadcast": ("trainer.weight_broadcast", "inference.weight_broadcast"),
    "weights.transport": ("trainer.weight_broadcast.type",),
    "bench": ("orchestrator.bench",),
    # Older places of keys of the rollout program.
    "orchestrator.model": ("rollout.model",),
    "orchestrator.client": ("rollout.client",),
    "orchestrator.log.vf_level": ("rollout.vf_level",),
}
"""Each shared key and the component keys that take its value."""

_NONE_SAYS_SOMETHING = frozenset({"max_steps", "ckpt", "wandb"})
_SWITCHED_ON = "__switched_on__"
_MISSING = object()


def hand_down(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the shared keys of one layer to the components; a component's own key in the same layer wins.

    Layers are merged afterwards, so a shared key on the command line beats a component's key in a file, and a
    component's key on the command line beats both. A shared key alone does not switch `inference` on.
    """
    spread: dict[str, Any] = _copy(layer)
    inference = spread.get("inference", _MISSING)
    if isinstance(inference, dict):
        inference[_SWITCHED_ON] = True
    for source, targets in HANDED_DOWN.items():
        value = _get(spread, source.split("."))
        if value is _MISSING or (value is None and source not in _NONE_SAYS_SOMETHING):
            continue
        for target in targets:
            if not (target.startswith("inference.") and inference is None):
                _set_below(spread, target.split("."), value)
    return spread


def settle_inference(values: dict[str, Any]) -> bool:
    """Drops an inference section that only shared keys have filled; True when an engine is to be started."""
    inference = values.get("inference")
    if not isinstance(inference, dict):
        return inference is not None
    if inference.pop(_SWITCHED_ON, False):
        return True
    del values["inference"]
    return False


def hosted_environments(entries: Iterable[Any]) -> list[dict[str, Any]]:
    """The environments that the rollout program must host for these train and eval entries, each name once.

    Raises ValueError when two entries of one name are different environments.
    """
    hosted: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("id"), str):
            continue  # validation of the orchestrator's own key reports it
        name = entry.get("name") or entry["id"]
        known = hosted.setdefault(name, {key: entry[key] for key in ("id", "name", "args", "sampling") if key in entry})
        if known["id"] != entry["id"] or (known.get("args") or {}) != (entry.get("args") or {}):
            raise ValueError(
                f"orchestrator: two environments are called {name!r} but differ in id or args; give one of them"
                " another name"
            )
    return list(hosted.values())


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _get(values: Mapping[str, Any], path: list[str]) -> Any:
    found: Any = values
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return _MISSING
        found = found[key]
    return found


def _set_below(values: dict[str, Any], path: list[str], shared: Any) -> None:
    target = values
    for key in path[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            return  # the component is switched off, or wrong, which validation reports
    target[path[-1]] = _under(shared, target.get(path[-1], _MISSING))


def _under(shared: Any, own: Any) -> Any:
    """The shared value where the component says nothing of its own."""
    if own is _MISSING:
        return _copy(shared)
    if isinstance(shared, Mapping) and isinstance(own, Mapping):
        return {
            **_copy(own),
            **{key: _under(value, own.get(key, _MISSING)) for key, value in shared.items()},
        }
    return own
