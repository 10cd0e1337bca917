"""One step of a run as a timeline of both sides, from the traces in its output folder; names every gap.

    python tests/benchmarks/step_timeline.py OUTPUT_DIR [--step N] [--gap-ms 50]

Two lanes: the trainer, busy in forward and backward and in the optimizer, and the engines, busy while a request is in
flight. A gap is a time longer than --gap-ms in which a lane is not busy. It is named by what else went on meanwhile,
with the milliseconds of each, the longest first; "untraced" is what no span covers, such as the trainer's snapshot. The
step is the orchestrator's span of it (default: the middle one), so at async levels above 0 the trainer's lane may show
the end of the step before. Lanes go by their programs' clocks: on several machines they are as near as those are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.cli.trace_file import read_lines, spans_of, trace_files

Interval = tuple[float, float]  # seconds

TRAINER = {"rl.train.forward_backward": "forward and backward", "rl.train.optimizer": "optimizer"}
ACTIVITIES: tuple[tuple[str, str], ...] = (  # (how a span's name begins, what it means for who waits)
    ("rl.train.forward_backward", "the trainer computes gradients"),
    ("rl.train.optimizer", "the trainer's optimizer steps"),
    ("rl.train.publish", "a version is published"),
    ("chat ", "engines sample"),
    ("rl.rollout", "rollouts are in flight"),
    ("meshrl.v1.RolloutService/RunRollouts", "groups are in flight"),
    ("meshrl.v1.TrainerService/SubmitBatch", "a batch is uploaded"),
    ("meshrl.v1.WeightSync/ActivateVersion", "a version is activated"),
    ("rl.sync.prepare", "engines load a version"),
    ("rl.sync.pause", "engines are paused"),
)


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span of a trace."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A time in which a lane was not busy, and what else went on in it, in seconds, the longest first."""

    lane: str
    start_s: float
    end_s: float
    meanwhile: Mapping[str, float]


def read_spans(folder: Path) -> list[Span]:
    """Every span in a run's traces; a line that a crash cut off is left out."""
    spans: list[Span] = []
    for path in trace_files(folder / "traces"):
        spans += map(_span, spans_of(read_lines(path)[0]))
    return spans


def _span(raw: Mapping[str, Any]) -> Span:
    attributes = {one["key"]: next(iter(one["value"].values()), None) for one in raw.get("attributes", ())}
    start_s, end_s = (int(raw[key]) * 1e-9 for key in ("startTimeUnixNano", "endTimeUnixNano"))
    return Span(name=raw["name"], start_s=start_s, end_s=end_s, attributes=attributes)


def steps_of(spans: Iterable[Span]) -> dict[int, Span]:
    """The orchestrator's span of each step."""
    return {int(span.attributes["rl.step"]): span for span in spans if span.name == "rl.step"}


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def within(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Their parts inside the window, joined."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return joined((start, end) for start, end in cut if end > start)


def outside(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What they leave of the window."""
    left: list[Interval] = []
    at = window[0]
    for start, end in within(intervals, window):
        if start > at:
            left.append((at, start))
        at = end
    return [*left, (at, window[1])] if at < window[1] else left


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def lanes_of(spans: Sequence[Span]) -> dict[str, list[Interval]]:
    """When each side was busy."""
    return {
        "trainer": joined((span.start_s, span.end_s) for span in spans if span.name in TRAINER),
        "engines": joined((span.start_s, span.end_s) for span in spans if span.name.startswith("chat ")),
    }


def gaps_of(spans: Sequence[Span], window: Interval, *, longer_s: float) -> list[Gap]:
    """Every gap of either lane in the window that is longer than `longer_s`, in order."""
    activities: dict[str, list[Interval]] = {}
    for begins, meaning in ACTIVITIES:
        activities[meaning] = joined((span.start_s, span.end_s) for span in spans if span.name.startswith(begins))
    found: list[Gap] = []
    for lane, busy in lanes_of(spans).items():
        for gap in outside(busy, window):
            if gap[1] - gap[0] <= longer_s:
                continue
            parts = {meaning: within(intervals, gap) for meaning, intervals in activities.items()}
            named = {meaning: seconds(part) for meaning, part in parts.items() if part}
            untraced = seconds(outside([one for part in parts.values() for one in part], gap))
            named |= {"untraced": untraced} if untraced > 0.001 else {}
            meanwhile = dict(sorted(named.items(), key=lambda item: -item[1]))
            found.append(Gap(lane=lane, start_s=gap[0], end_s=gap[1], meanwhile=meanwhile))
    return sorted(found, key=lambda gap: gap.start_s)


def timeline(spans: Sequence[Span], step: int, *, longer_s: float) -> str:
    """The step as text: its lanes with their busy shares, then its events and gaps in order. Times from its start."""
    whole = steps_of(spans)[step]
    window = (whole.start_s, whole.end_s)
    lines = [f"step {step}: {window[1] - window[0]:.3f} s"]
    for lane, busy in lanes_of(spans).items():
        lines.append(f"  {lane:<8} busy {seconds(within(busy, window)) / (window[1] - window[0]):6.1%}")
    events: list[tuple[float, str]] = []
    for span in spans:
        if span.end_s <= window[0] or span.start_s >= window[1]:
            continue
        if span.name in TRAINER:
            text = f"trainer  {TRAINER[span.name]}"
        elif span.name in ("rl.train.publish", "rl.sync.pause", "meshrl.v1.WeightSync/ActivateVersion"):
            text = f"weights  {dict(ACTIVITIES)[span.name]}"
        else:
            continue
        events.append((span.start_s, f"{text}, {1000 * (span.end_s - span.start_s):.0f} ms"))
    for gap in gaps_of(spans, window, longer_s=longer_s):
        causes = ", ".join(f"{meaning} {1000 * length:.0f}" for meaning, length in gap.meanwhile.items())
        events.append((gap.start_s, f"{gap.lane:<8} GAP of {1000 * (gap.end_s - gap.start_s):.0f} ms: {causes}"))
    lines += [f"  {1000 * (at - window[0]):>9.0f} ms  {text}" for at, text in sorted(events)]
    return "\n".join(dict.fromkeys(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--gap-ms", type=float, default=50.0)
    read = parser.parse_args()
    spans = read_spans(read.output_dir)
    steps = sorted(steps_of(spans))
    if not steps:
        parser.error(f"no step in {read.output_dir / 'traces'}; a run of rl or orchestrator writes them there")
    step = steps[len(steps) // 2] if read.step is None else read.step
    if step not in steps:
        parser.error(f"step {step} is not in the traces, which have {steps[0]} to {steps[-1]}")
    print(timeline(spans, step, longer_s=read.gap_ms / 1000))


if __name__ == "__main__":
    main()
