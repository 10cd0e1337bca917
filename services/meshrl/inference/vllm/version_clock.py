"""Which weight version sampled which tokens of a request: turns the pauses that vLLM's scheduler counted into spans.

Runs in the process that serves HTTP; `whole_completions` counts the pauses in vLLM's process.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NotRequired, TypedDict

from meshrl.wire.types import VersionSpan


class CompletionRecord(TypedDict):
    """vLLM's scheduler's report of a finished request to the front end; arrays as little-endian bytes."""

    first_pause: int  # pauses before it came
    resumed_at: list[int]  # tokens when a pause ended, one for each since it came
    prompt_pause: NotRequired[int]  # pauses before the one that the prompt was computed before, if there was one
    queue: NotRequired[list[int]]  # requests that wait for room, and those preempted since the record before
    times: NotRequired[list[float]]  # seconds in the queue, until the first token, for the others
    logprobs: NotRequired[bytes]  # (T,) float32
    top_ids: NotRequired[bytes]  # (T, K) int32
    top_logprobs: NotRequired[bytes]  # (T, K) float32


class VersionClock:
    """The served version, and the one served after each pause since the start.

    Engine and scheduler count pauses alike, so a request carries only the count.
    """

    def __init__(self, version: int | None) -> None:
        self.version = version
        self._after_pause: list[int | None] = [version]
        self._weights = 0  # grows whenever the weights change, not just their name

    @property
    def salt(self) -> str:
        """Of the prefix cache: blocks are shared by requests under the same weights only."""
        return f"w{self._weights}"

    def serve(self, version: int, *, same: bool = False) -> None:
        """Within a pause, or with `same` by name only, at any time."""
        self.version = version
        if same:
            self._after_pause[-1] = version
        else:
            self._weights += 1

    def resumed(self) -> None:
        self._after_pause.append(self.version)

    def spans(self, record: CompletionRecord, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Spans over a finished completion; empty ones are left out, equal neighbours joined.

        The first one names the version that computed the prompt, if that is another.
        """
        prompt_pause = record.get("prompt_pause")
        prompt_version = None if prompt_pause is None else self._after_pause[prompt_pause]
        pause = record["first_pause"]
        bounds = [0, *record["resumed_at"], num_tokens]
        spans: list[VersionSpan] = []
        for index, (start, end) in enumerate(pairwise(bounds)):
            version = self._after_pause[pause + index]
            if end <= start or version is None:
                continue
            if spans and spans[-1].version == version:
                spans[-1] = replace(spans[-1], end=end)
            else:
                older = prompt_version if not spans and prompt_version != version else None
                spans.append(VersionSpan(start=start, end=end, version=version, prompt_version=older))
        return tuple(spans)
