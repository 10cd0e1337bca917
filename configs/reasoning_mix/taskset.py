"""reasoning-gym's procedural tasks as a taskset: `reasoning_gym:leg_counting` and over a hundred more.

A task is made from seed and index alone: nothing is downloaded, and the same index is the same task on every machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import functools
import json
import threading
import warnings
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Self

import verifiers.v1 as vf
from pydantic import ConfigDict, Field, model_validator

from meshrl.wire.values import JsonObject

if TYPE_CHECKING:
    import reasoning_gym


__all__ = ["ReasoningGymTaskset"]

INSTALL = "uv sync --extra reasoning-gym, or uv pip install 'meshrl[reasoning-gym]'"

Entry = JsonObject
"""reasoning-gym's task: question, answer, and metadata of the dataset's own kind."""


class ReasoningGymConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which dataset, how many of its tasks, and the dataset's own options, such as `max_animals`."""

    model_config = ConfigDict(extra="allow")

    dataset: str = ""
    """A dataset of reasoning-gym; the id `reasoning_gym:NAME` sets it."""

    size: int = Field(default=500, ge=1)
    """Number of tasks."""

    seed: int = 42
    """Seed of all tasks; held-out tasks want one of their own."""

    prompt_style: str = "default"
    """System prompt, by its name in reasoning-gym: default, simple, direct, chain_of_draft or DeepSeekZero. All ask for
    the answer between <answer> and </answer>."""

    instructions: str | None = None
    """Your own system prompt in place of prompt_style's; it must ask for <answer> and </answer>, too."""

    @property
    def options(self) -> dict[str, object]:
        return {**(self.model_extra or {}), "size": self.size, "seed": self.seed}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.dataset:
            raise ValueError("which dataset? write the id as reasoning_gym:leg_counting, or set args.dataset")
        prompts = _package().utils.SYSTEM_PROMPTS
        if self.prompt_style not in prompts:
            raise ValueError(f"prompt_style must be one of {', '.join(prompts)}; got {self.prompt_style!r}")
        _Dataset.of(self.dataset, self.options)
        return self


class ReasoningGymData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    dataset: str
    options: dict[str, object]
    index: int
    answer: str | None
    """None where many are right and only the dataset's scorer knows."""


class ReasoningGymTask(vf.Task[ReasoningGymData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Answer the question between <answer> and </answer>."""

    @vf.reward  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def correct(self, trace: vf.Trace) -> float:
        """By the dataset's own scorer, 0 to 1; 0 for an answer that it cannot read."""
        answer = _answer(trace)
        score = await asyncio.to_thread(self._score, answer)
        trace.record_metric("unreadable", float(score is None))
        return score or 0.0

    @vf.metric  # type: ignore[untyped-decorator]  # verifiers is untyped for the checker
    async def answered(self, trace: vf.Trace) -> float:
        return float(_answer(trace) is not None)

    def _score(self, answer: str | None) -> float | None:
        dataset = _Dataset.of(self.data.dataset, self.data.options)
        entry = dataset.entry(self.data.index)
        try:
            return dataset.score(answer, entry)
        except Exception:  # noqa: BLE001  # scorers take for granted what a model need not write, such as a number
            return None


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Each task is made when it is asked for: some datasets take seconds for one."""

    @property
    def num_tasks(self) -> int:
        return int(self.config.size)

    def task_at(self, index: int) -> ReasoningGymTask:
        config = self.config
        entry = _Dataset.of(config.dataset, config.options).entry(index)
        data = ReasoningGymData(
            name=f"{config.dataset}#{index}",
            prompt=entry["question"],
            system_prompt=config.instructions or _package().utils.SYSTEM_PROMPTS[config.prompt_style],
            dataset=config.dataset,
            options=config.options,
            index=index,
            answer=entry["answer"],
        )
        return ReasoningGymTask(data, config.task)

    def load(self) -> Iterable[ReasoningGymTask]:
        return map(self.task_at, range(self.num_tasks))


class _Dataset:
    """Some datasets keep state while they make a task, so one thread at a time uses one."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self._dataset = _created(name, options)
        self._lock = threading.Lock()
        self._entry = functools.lru_cache(maxsize=64)(self._dataset.__getitem__)  # for the rollouts of a group

    @staticmethod
    def of(name: str, options: Mapping[str, object]) -> _Dataset:
        """Options are as in JSON or TOML. Raises ValueError and ImportError. The same object for the same options."""
        return _dataset(name, json.dumps(options, sort_keys=True))

    def entry(self, index: int) -> Entry:
        with self._lock:
            entry: Entry = self._entry(index)
            return entry

    def score(self, answer: str | None, entry: Entry) -> float:
        with self._lock:
            return float(self._dataset.score_answer(answer, entry))


@functools.lru_cache(maxsize=256)
def _dataset(name: str, options: str) -> _Dataset:
    return _Dataset(name, json.loads(options))


def _created(name: str, options: JsonObject) -> reasoning_gym.dataset.ProceduralDataset:
    """Raises ValueError for a wrong name or option."""
    package = _package()
    known = package.factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the {len(known)} datasets are {', '.join(known)}"
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {hint}")
    fields = {field.name for field in dataclasses.fields(known[name][1])}
    if unknown := sorted(set(options) - fields):
        raise ValueError(f"{name} has no option {', '.join(unknown)}; its options are {', '.join(sorted(fields))}")
    given = dict(options)
    if "datasets" in given:  # of composite, whose parts are objects
        given["datasets"] = [package.composite.DatasetSpec(**{"config": {}, **spec}) for spec in given["datasets"]]
    try:
        return package.create_dataset(name, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its options: {error}") from error


def _answer(trace: vf.Trace) -> str | None:
    answer: str | None = _package().utils.extract_answer(trace.last_reply or "")
    return answer


@functools.cache
def _package() -> ModuleType:
    """Imported when it is first needed: it takes seconds. Raises ImportError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compilation of a package that it needs
            import reasoning_gym
            import reasoning_gym.composite
    except ModuleNotFoundError as error:
        raise ImportError(f"reasoning-gym is not installed ({error}); install it: {INSTALL}") from error
    module: ModuleType = reasoning_gym
    return module
