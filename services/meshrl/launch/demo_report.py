"""The report of a demo, from the metrics of its RL run."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from meshrl.wire.growing_file import GrowingFile, json_records
from meshrl.wire.text_table import plain_table
from meshrl.wire.values import JsonObject

EVAL_SCORE = re.compile(r"eval/(?P<environment>.+)/avg@\d+")
EDGE_STEPS = 5
"""At either end of a run, over which the training reward is averaged."""

PACKAGES = (
    "meshrl", "torch", "transformers", "tokenizers", "verifiers", "renderers", "grpcio", "protobuf", "aiohttp", "numpy",
    "safetensors", "pydantic", "opentelemetry-sdk",
)  # fmt: skip


class ReportError(Exception):
    """The message names what the metrics lack."""


@dataclass(frozen=True, kw_only=True)
class TokenRates:
    engine: float
    """Sampled tokens over the wall time of the run."""

    trainer: float
    """Trained tokens, prompts included, over the time the trainer worked."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    reward_before: float
    """Held-out, of the warmed-up model; `reward_after` is that of the last version."""

    reward_after: float
    reward_gain: float
    train_reward_first: float
    train_reward_last: float
    steps: int
    seconds: float
    seconds_by_stage: dict[str, float]
    rollouts_per_s: float
    tokens_per_s: TokenRates
    sync_pause_s: float
    """Mean; a version stopped generation."""

    sync_pause_max_s: float
    sync_lag_s: float
    """Mean, from a trained version to every engine serving it."""

    sync_lag_max_s: float
    staleness_max: int
    """Versions between a trained policy and the oldest token that it was trained on."""

    engine: str
    max_async_level: int
    seed: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Points of the picture, as (step, reward)."""

    train: list[tuple[int, float]]
    held_out: list[tuple[int, float]]


def read_records(path: Path) -> list[JsonObject]:
    """Raises ReportError without the file."""
    if not path.exists():
        raise ReportError(f"{path} is missing: the run ended before its first step; see the logs beside it")
    return list(json_records(GrowingFile(path).read_on()))


def curves(records: Sequence[JsonObject]) -> Curves:
    """Training reward of each step, and the held-out score of each evaluated version."""
    train = [
        (int(record["step"]), float(record["reward/all/mean"])) for record in records if "reward/all/mean" in record
    ]
    held_out: dict[int, float] = {}
    for record in records:
        scores = [float(value) for name, value in record.items() if EVAL_SCORE.fullmatch(name) and value is not None]
        if scores:
            held_out[int(record.get("eval/version", record["step"]))] = sum(scores) / len(scores)
    return Curves(train=train, held_out=sorted(held_out.items()))


def summarise(
    records: Sequence[JsonObject],
    *,
    seconds_by_stage: Mapping[str, float],
    engine: str,
    max_async_level: int,
    seed: int,
    versions: Mapping[str, str],
) -> Summary:
    """Raises ReportError if steps are missing, or evaluations at both ends."""
    points = curves(records)
    steps = [record for record in records if "reward/all/mean" in record]
    if not steps:
        raise ReportError("the run made no step, so there is nothing to report; see its logs")
    if len(points.held_out) < 2:
        raise ReportError(
            f"the run has {len(points.held_out)} evaluations, but before and after are needed; "
            "set orchestrator.eval with eval_base and eval_final"
        )
    rewards = [reward for _, reward in points.train]
    before, after = points.held_out[0][1], points.held_out[-1][1]
    wall_s = sum(_column(steps, "time/step"))
    work_s = sum(_column(steps, "time/forward_backward")) + sum(_column(steps, "time/optimizer"))
    sampled = sum(
        rate * seconds
        for rate, seconds in zip(
            _column(steps, "perf/inference_tokens_per_s"), _column(steps, "time/step"), strict=True
        )
    )
    pauses, lags = _column(steps, "weights/pause_s"), _column(steps, "weights/lag_s")
    return Summary(
        reward_before=before,
        reward_after=after,
        reward_gain=after - before,
        train_reward_first=_mean(rewards[:EDGE_STEPS]),
        train_reward_last=_mean(rewards[-EDGE_STEPS:]),
        steps=len(steps),
        seconds=sum(seconds_by_stage.values()),
        seconds_by_stage=dict(seconds_by_stage),
        rollouts_per_s=sum(_column(steps, "batch/rollouts")) / max(wall_s, 1e-9),
        tokens_per_s=TokenRates(
            engine=sampled / max(wall_s, 1e-9), trainer=sum(_column(steps, "batch/tokens")) / max(work_s, 1e-9)
        ),
        sync_pause_s=_mean(pauses),
        sync_pause_max_s=max(pauses, default=0.0),
        sync_lag_s=_mean(lags),
        sync_lag_max_s=max(lags, default=0.0),
        staleness_max=int(max(_column(steps, "off_policy/all/max"), default=0.0)),
        engine=engine,
        max_async_level=max_async_level,
        seed=seed,
        versions=dict(versions),
    )


def table(summary: Summary) -> str:
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary.seconds_by_stage.items())
    rows = [
        ("held-out reward before RL", f"{summary.reward_before:.3f}"),
        ("held-out reward after RL", f"{summary.reward_after:.3f}  ({summary.reward_gain:+.3f})"),
        (
            f"training reward, first and last {EDGE_STEPS} steps",
            f"{summary.train_reward_first:.3f} -> {summary.train_reward_last:.3f}",
        ),
        ("steps", f"{summary.steps}"),
        ("seconds", f"{summary.seconds:.0f}  ({stages})"),
        ("rollouts a second", f"{summary.rollouts_per_s:.1f}"),
        (f"tokens a second, {summary.engine} engine (sampled)", f"{summary.tokens_per_s.engine:,.0f}"),
        ("tokens a second, trainer (while it works)", f"{summary.tokens_per_s.trainer:,.0f}"),
        ("weight sync, pause of generation", _milliseconds(summary.sync_pause_s, summary.sync_pause_max_s)),
        ("weight sync, lag of the engines", _milliseconds(summary.sync_lag_s, summary.sync_lag_max_s)),
        (
            "staleness, most versions behind",
            f"{summary.staleness_max}  (sampled at most {summary.max_async_level} steps ahead)",
        ),
    ]
    return plain_table(rows, indent="  ")


def runs_table(summaries: Mapping[str, Summary]) -> str:
    rows = [
        (
            run,
            f"{one.reward_before:.3f} -> {one.reward_after:.3f}",
            f"{one.train_reward_first:.3f} -> {one.train_reward_last:.3f}",
            f"{one.steps}",
            f"{one.rollouts_per_s:.1f}",
            f"{one.sync_lag_s * 1e3:.0f} ms",
        )
        for run, one in summaries.items()
    ]
    stages = next(iter(summaries.values())).seconds_by_stage
    took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in stages.items())
    columns = [
        "run",
        "held-out reward",
        f"training, first and last {EDGE_STEPS}",
        "steps",
        "rollouts/s",
        "lag of versions",
    ]
    return f"{plain_table([columns, *rows], indent='  ')}\n\n  seconds {sum(stages.values()):.0f}  ({took})"


def write_summary(summaries: Mapping[str, Summary], path: Path) -> None:
    figures = {run: asdict(summary) for run, summary in summaries.items()}
    path.write_text(json.dumps(figures.get("", figures), indent=2) + "\n", encoding="utf-8")


def draw(points: Mapping[str, Curves], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of import that only the picture needs
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for run, of in points.items():
        (line,) = axes.plot(*zip(*of.train, strict=True), alpha=0.5, label=f"{run}, training, each step")
        axes.plot(
            *zip(*of.held_out, strict=True), "o-", color=line.get_color(), label=f"{run}, held out, by policy version"
        )
    axes.set(xlabel="step", ylabel="mean reward", title="reward over training", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(str(path))


def installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _column(records: Sequence[JsonObject], name: str) -> list[float]:
    return [float(record[name]) for record in records if record.get(name) is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _milliseconds(mean_s: float, max_s: float) -> str:
    return f"{mean_s * 1e3:.1f} ms  (at most {max_s * 1e3:.1f} ms)"
