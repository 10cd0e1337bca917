"""Caches computations of pydantic, verifiers and tokenizers that give the same result in every rollout.

A function is replaced where the installed version still has it; the contract tests compare the results. One worker
plays 380 rollouts/s with the caches and 210 without (`bench_workers.py --workers 1 --in-flight 64 --rollouts 1500`,
on two cores).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from types import MethodType, ModuleType
from typing import TypeVar

import pydantic._internal._fields as pydantic_fields
from verifiers.v1 import harness, rollout, session, task
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils import decorators, loaders

FoundT = TypeVar("FoundT")
Teardown = Callable[[SubprocessRuntime], Awaitable[None]]

KEPT = 4096


def install() -> None:
    # Which default factories take the data validated so far: pydantic parses their signatures for each object it makes.
    _replace((pydantic_fields,), "takes_validated_data_argument", functools.lru_cache(KEPT))
    # Where a harness is found: a search of the import path for each episode.
    _replace((loaders,), "harness_class", functools.lru_cache(KEPT))
    _replace((decorators, harness, rollout, task), "discover_decorated", _cache_names)
    _replace((decorators, rollout, session), "invoke", _cache_parameters)
    # A task's key, which is asked for four times in each episode: the hash of its data, which is frozen.
    _replace((task.Task,), "hash", _cache_hash)
    # The folder of each rollout, which most leave empty: a thread is asked to remove it.
    _replace((SubprocessRuntime,), "teardown", _remove_empty_folder_first)


def _replace(modules: tuple[ModuleType | type, ...], name: str, wrap: Callable[[FoundT], object]) -> None:
    found: FoundT | None = getattr(modules[0], name, None)
    if found is None or hasattr(found, "__wrapped__"):
        return
    wrapped = wrap(found)
    for module in modules:
        if getattr(module, name, None) is found:
            setattr(module, name, wrapped)


def _cache_names(discover: Callable[[object, str], list[Callable[..., object]]]) -> Callable[..., object]:
    """`discover_decorated`, which looks through all attributes of a class."""
    names_of: dict[tuple[type, str], dict[str, None]] = {}

    @functools.wraps(discover)
    def remembered(obj: object, attr: str) -> list[Callable[..., object]]:
        key = (type(obj), attr)
        if (names := names_of.get(key)) is not None and names.keys().isdisjoint(vars(obj)):
            return [getattr(obj, name) for name in names]
        found = discover(obj, attr)
        names = {method.__name__: None for method in found}
        plain = all(isinstance(method, MethodType) and method.__self__ is obj for method in found)
        # What an instance itself carries may differ from one to the next; a method may be known by another name.
        if plain and [getattr(obj, name, None) for name in names] == found and len(names_of) < KEPT:
            names_of[key] = names
        return found

    return remembered


def _cache_parameters(invoke: Callable[..., object]) -> Callable[..., object]:
    """`invoke`, which reads the signature of a hook."""

    wanted: dict[Callable[..., object], tuple[str, ...]] = {}

    @functools.wraps(invoke)
    def remembered(fn: Callable[..., object], available: dict[object, object]) -> object:
        if type(fn) is not MethodType or not all(type(key) is str for key in available):
            return invoke(fn, available)
        names = wanted.get(fn.__func__)
        if names is None:
            names = tuple(inspect.signature(fn).parameters)
            if len(wanted) < KEPT:
                wanted[fn.__func__] = names
        return fn(**{name: available[name] for name in names if name in available})

    return remembered


class _Remembered(property):
    """`__wrapped__` is the property without a cache."""

    __wrapped__: property


def _cache_hash(plain: property) -> property:
    """`Task.hash`; a task with other data (`with_data`) has another one."""
    assert plain.fget is not None  # it can be read
    work_out = plain.fget

    def remembered(of: task.Task) -> str:
        held: tuple[object, str] | None = vars(of).get("_meshrl_hash")
        if held is None or held[0] is not of.data:
            held = vars(of)["_meshrl_hash"] = (of.data, work_out(of))
        return held[1]

    wrapped = _Remembered(remembered)
    wrapped.__wrapped__ = plain
    return wrapped


def _remove_empty_folder_first(teardown: Teardown) -> Teardown:

    @functools.wraps(teardown)
    async def quick(runtime: SubprocessRuntime) -> None:
        if runtime.workdir is not None and not runtime._background:
            try:
                runtime.workdir.rmdir()
            except OSError:  # something is in it
                pass
            else:
                return
        await teardown(runtime)

    return quick
