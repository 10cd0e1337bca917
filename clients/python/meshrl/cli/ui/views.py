"""Data of the page's views: a step's rollouts and timeline, the ledger, versions."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from meshrl.cli.rollouts import first_words
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.trace_file import RunSpan, read_lines, spans_of, trace_files
from meshrl.diagnosis.history import Column
from meshrl.wire.values import JsonObject

FIRST_WORDS = 160
"""Characters of a reply in a list of rollouts."""
MOST_SPANS = 4000
"""Of a timeline; of more the longest are shown."""
KEPT_SPANS = 300_000
"""The newest, which are held; `meshrl trace` reads all."""

NEWEST_BYTES, LEAST_BYTES = 4 * 2**20, 2**16
"""Read at first of all trace files, from their ends, and of one at least; a MiB has some 15,000 spans."""
STEPS_OF = "orchestrator"

MOST_VERSIONS, KEPT_VERSIONS = 40, 400

WINDOW = 1024
"""Tokens that the page fetches at once."""
PER_TOKEN = ("token_ids", "logprobs", "trainer_logprobs")
"""A sample's lists with one entry a token."""

LATELY_S = 60.0
OF_VERSIONS = ("weights", "inference")
"""Programs whose traces name versions; those of every rollout take far longer to read."""
FUNNEL_S, SLOW_S = 10.0, 0.2
"""An answer that took SLOW_S to count is reused for FUNNEL_S."""


def _is_step(span: RunSpan) -> bool:
    return span.name == "rl.step" and "rl.step" in span.attributes


class KeptRollouts:
    """The last step stays read. Not for several threads."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._step = -1
        self._of = (0, 0)
        self._lines: list[JsonObject] = []

    def listed(self, step: int, words: str = "") -> list[JsonObject]:
        """The step's rollouts without tokens, or those with `words` in a message."""
        return [
            {key: value for key, value in line.items() if key != "samples"} | {"says": first_words(line, FIRST_WORDS)}
            for line in self._read(step)
            if not words or _holds(line, words.casefold())
        ]

    def whole(self, step: int, rollout_id: str) -> JsonObject | None:
        return next((line for line in self._read(step) if line["rollout_id"] == rollout_id), None)

    def _read(self, step: int) -> list[JsonObject]:
        of = _state(self._folder.path / "rollouts" / f"step_{step}.jsonl.zst")
        if (step, of) != (self._step, self._of):
            self._step, self._of, self._lines = step, of, self._folder.samples(step)
        return self._lines


def _holds(line: JsonObject, words: str) -> bool:
    messages = (message["text"] for sample in line.get("samples", ()) for message in sample["messages"])
    return any(words in text.casefold() for text in (*messages, line.get("message", "")))


WAITS = (
    ("time/wait_for_batch", "the trainer waited {} for the batch"),
    ("time/wait_for_rollouts", "the orchestrator waited {} for rollouts"),
    ("time/wait_for_ckpt", "the orchestrator waited {} for the trainer"),
    ("time/wait_for_publication", "the trainer waited {} for the version before to be published"),
    ("time/save_ckpt", "a checkpoint held training up for {}"),
    ("weights/lag_s", "the engines had the version {} after its upload"),
    ("weights/pause_s", "the engines paused {} to take it"),
)
"""Metrics of a step's waits, and their words."""


def waits_of(columns: Mapping[str, Column], step: int) -> list[str]:
    """The longest first, without those below 10 ms."""
    found = []
    for name, words in WAITS:
        column = columns.get(name, Column())
        place = bisect_left(column.steps, step)
        if place < len(column.steps) and column.steps[place] == step and column.values[place] >= 0.01:
            found.append((column.values[place], words.format(f"{column.values[place]:.2f} s")))
    return [words for _, words in sorted(found, reverse=True)]


OF_ONE_START = re.compile(r"(^|\.)(port|session|output_dir|run_id|address|rollout|trainer|weights|token|name_file)$")
"""Keys that differ between any two runs."""


def differences(settings: Sequence[Mapping[str, str]]) -> list[JsonObject]:
    """The keys by which configurations differ, with their values; None for a missing key."""
    keys = sorted({key for one in settings for key in one if not OF_ONE_START.search(key)})
    found = [{"key": key, "values": [one.get(key) for one in settings]} for key in keys]
    return [one for one in found if len(set(one["values"])) > 1]


def without_tokens(sample: JsonObject) -> JsonObject:
    """Without lists of one entry a token, and whether the trainer's logprobs are among them."""
    kept = {key: value for key, value in sample.items() if key not in PER_TOKEN}
    return {**kept, "compared": "trainer_logprobs" in sample}


def tokens_of(sample: JsonObject, window: int) -> JsonObject:
    return {key: sample[key][window * WINDOW : (window + 1) * WINDOW] for key in PER_TOKEN if key in sample}


class LedgerFunnel:
    """How many rollouts are in each state, by environment and reason. Not for several threads.

    Counting a million takes a second, so an answer is reused until the ledger changes, and for FUNNEL_S after a slow
    one.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._counted: JsonObject = {"rows": [], "over_s": 0.0}
        self._of: tuple[tuple[int, int], ...] = ()
        self._until_s = 0.0

    def read(self) -> JsonObject:
        """`lately` counts the last `over_s` seconds of the ledger, at most those since the run began. No rows without a
        ledger."""
        now = tuple(_state(self._folder.path / name) for name in ("ledger.sqlite", "ledger.sqlite-wal"))
        if now == self._of or time.monotonic() < self._until_s:
            return self._counted
        ledger = self._folder.ledger()
        if ledger is None:
            return self._counted
        began = time.monotonic()
        with closing(ledger):
            (began_s,) = ledger.execute("SELECT MIN(began_s) FROM runs").fetchone()
            (last_s,) = ledger.execute("SELECT MAX(updated_s) FROM rollouts").fetchone()
            over_s = min(LATELY_S, last_s - began_s) if last_s else 0.0  # a step's rollouts come to it at once
            query = (
                "SELECT environment, state, reason, COUNT(*) AS count, SUM(updated_s > ?) AS lately FROM rollouts"
                " GROUP BY environment, state, reason"
            )
            rows = [dict(row) for row in ledger.execute(query, ((last_s or 0.0) - over_s,))]
        self._counted = {"rows": rows, "over_s": over_s}
        self._of = now
        self._until_s = time.monotonic() + (FUNNEL_S if time.monotonic() - began > SLOW_S else 0.0)
        return self._counted


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


class Traces:
    """The newest spans, read on as the files grow. Not for several threads.

    Millions of spans take minutes: only each file's end is read, and all again for an older step.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._offsets: dict[int, int] = {}
        self._from_s = 0.0  # from then on all files have been read
        self._spans: deque[RunSpan] = deque(maxlen=KEPT_SPANS)
        self._steps: dict[int, RunSpan] = {}
        self._versions: dict[tuple[str, int], dict[str, Any]] = {}  # by content and number
        self._engines: dict[tuple[str, int], str] = {}  # by program and process

    @property
    def steps(self) -> list[int]:
        return sorted(self._steps)

    def read_on(self, programs: tuple[str, ...] = ("",)) -> None:
        """Takes the new spans of programs whose names begin so."""
        paths = trace_files(self._folder.path / "traces")
        share = max(LEAST_BYTES, NEWEST_BYTES // max(1, len(paths)))
        for path in paths:
            if not path.name.startswith(programs):
                continue
            try:
                found = path.stat()
                file = found.st_ino  # a file that was moved aside is known by it
                cut = file not in self._offsets and found.st_size > share
                begin = found.st_size - share if cut else self._offsets.get(file, 0)
                lines, end = read_lines(path, begin)
                if path.stat().st_ino != file:
                    continue  # moved aside meanwhile: the next call reads both
            except FileNotFoundError:  # the same, or the oldest one, which goes
                continue
            self._offsets[file] = end
            spans = list(spans_of(path, lines))
            if cut and spans:
                self._from_s = max(self._from_s, spans[0].start_s)
            for span in spans:
                self._spans.append(span)
                if "meshrl.version" in span.attributes:
                    self._take_version(span)
                if _is_step(span):
                    self._steps[int(span.attributes["rl.step"])] = span

    def _during(self, step: int) -> tuple[RunSpan | None, list[RunSpan]]:
        root, spans = self._steps.get(step), iter(self._spans)
        if root is None or root.start_s < self._from_s:
            every = self._folder.spans(STEPS_OF)
            root = next((span for span in every if _is_step(span) and int(span.attributes["rl.step"]) == step), None)
            spans = self._folder.spans()
        if root is None:
            return None, []
        end_s = root.start_s + root.seconds
        return root, [one for one in spans if one.start_s < end_s and one.start_s + one.seconds > root.start_s]

    def versions(self, most: int = MOST_VERSIONS) -> JsonObject:
        """The newest versions, the newest first, and the engines that took them.

        Each has its delta base, bytes, full bytes and lag, and for each engine its pause and its seconds behind the
        first engine, as far as traces have them.
        """
        found = sorted(self._versions.values(), key=lambda one: (one["version"], one["sealed"]), reverse=True)[:most]
        return {"versions": found, "engines": sorted({engine for one in found for engine in one["engines"]})}

    def _take_version(self, span: RunSpan) -> None:
        about = span.attributes
        key = (about.get("meshrl.artifact_id", ""), int(about["meshrl.version"]))
        one = self._versions.setdefault(key, {"version": key[1], "sealed": span.start_s, "engines": {}})
        one.update(
            {name: about[f"meshrl.{name}"] for name in ("run_id", "kind", "transport") if f"meshrl.{name}" in about}
        )
        for name, attribute in (("base", "base_version"), ("full_bytes", "full_bytes"), ("bytes", "num_bytes")):
            if f"meshrl.{attribute}" in about:
                one[name] = int(about[f"meshrl.{attribute}"])
        if span.name == "rl.sync":
            one |= {"sealed": span.start_s, "lag": span.seconds}
        elif span.name == "rl.sync.apply" and "meshrl.engine_id" in about:
            self._engines[span.program, span.process] = about["meshrl.engine_id"]
            pause_s = float(about.get("meshrl.pause_s", span.seconds))  # an older run has no pause of its own
            one["engines"][about["meshrl.engine_id"]] = {"pause": pause_s, "at": span.start_s}
            first = min(engine["at"] for engine in one["engines"].values())
            for engine in one["engines"].values():
                engine["after"] = engine["at"] - first
        if len(self._versions) > 2 * KEPT_VERSIONS:
            newest = sorted(self._versions.items(), key=lambda kept: kept[1]["sealed"])[-KEPT_VERSIONS:]
            self._versions = dict(newest)

    def timeline(self, step: int, most: int = MOST_SPANS) -> JsonObject | None:
        """The spans during a step, by program or engine; None for a step without a span.

        Spans of other steps overlap it: engines and trainer work on two steps at once.
        """
        root, during = self._during(step)
        if root is None:
            return None
        during.sort(key=lambda span: span.seconds, reverse=True)
        lanes: dict[str, list[JsonObject]] = {}
        for span in sorted(during[:most], key=lambda span: span.start_s):
            engine = self._engines.get((span.program, span.process)) if span.process else None
            lanes.setdefault(span.program if engine is None else f"engine {engine}", []).append(
                {
                    "name": span.name,
                    "start": span.start_s - root.start_s,
                    "seconds": span.seconds,
                    "step": span.attributes.get("rl.step"),
                    "about": {key: str(value)[:200] for key, value in span.attributes.items()},
                }
            )
        return {
            "step": step,
            "seconds": root.seconds,
            "lanes": lanes,
            "left_out": max(0, len(during) - most),
            "steps": [1 if self._from_s else min(self._steps), max(self._steps)],
        }
