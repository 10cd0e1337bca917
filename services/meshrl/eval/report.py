"""The report at the end of an evaluation: a table, a curve over the steps, and the figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loguru import logger

from meshrl.core.durable import write_file
from meshrl.eval.checkpoints import EvaluatedWeights
from meshrl.eval.scores import EnvironmentScores, Estimate
from meshrl.wire.text_table import markdown_table

SUMMARY, TABLE, CURVE, METRICS = "summary.json", "table.md", "curve.png", "metrics.jsonl"
HEAD = ("checkpoint", "environment", "rollouts", "avg@k", "pass@k", "failed", "tokens", "truncated")


@dataclass(frozen=True, kw_only=True)
class EvaluationPoint:
    weights: EvaluatedWeights
    scores: Sequence[EnvironmentScores]


def table(points: Sequence[EvaluationPoint]) -> str:
    lines = [HEAD]
    for point in points:
        for one in point.scores:
            metrics, name = one.metrics, f"eval/{one.environment}"
            lines.append(
                (
                    point.weights.name,
                    one.environment,
                    f"{one.scored}/{one.asked}",
                    f"avg@{one.group_size} {_shown(one.average)}",
                    "  ".join(f"pass@{k} {_shown(estimate)}" for k, estimate in one.passes.items()) or "-",
                    f"{metrics[f'{name}/failed']:.1%}",
                    f"{metrics.get(f'{name}/seq_len/mean', 0.0):.0f}",
                    f"{metrics.get(f'{name}/is_truncated/mean', 0.0):.1%}",
                )
            )
    return markdown_table(lines)


def write_report(folder: Path, points: Sequence[EvaluationPoint]) -> None:
    """With matplotlib and steps to draw, also a curve. Blocks."""
    write_file(folder / SUMMARY, json.dumps([_summary(point) for point in points], indent=2) + "\n")
    write_file(folder / TABLE, table(points) + "\n")
    write_file(folder / METRICS, "".join(json.dumps(record(point)) + "\n" for point in points))
    if len(points) > 1:
        _draw(folder / CURVE, points)


def record(point: EvaluationPoint) -> dict[str, float]:
    values = {"step": float(point.weights.step), "eval/version": float(point.weights.step)}
    for one in point.scores:
        values |= one.metrics
    return values


def _summary(point: EvaluationPoint) -> dict[str, object]:
    return {
        "checkpoint": point.weights.name,
        "step": point.weights.step,
        "folder": None if point.weights.folder is None else str(point.weights.folder),
        "environments": {
            one.environment: {
                "asked": one.asked,
                "scored": one.scored,
                "group_size": one.group_size,
                "avg": None if one.average is None else asdict(one.average),
                "pass": {str(k): asdict(estimate) for k, estimate in one.passes.items()},
            }
            for one in point.scores
        },
    }


def _draw(path: Path, points: Sequence[EvaluationPoint]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # an extra
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no curve is drawn without matplotlib: uv sync --extra plots")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(one.environment for point in points for one in point.scores):
        drawn = [
            (point.weights.step, one.average)
            for point in points
            for one in point.scores
            if one.environment == name and one.average is not None
        ]
        if not drawn:
            continue
        steps = [step for step, _ in drawn]
        axes.plot(steps, [average.value for _, average in drawn], "o-", label=name)
        axes.fill_between(
            steps, [average.low for _, average in drawn], [average.high for _, average in drawn], alpha=0.2
        )
    axes.set(xlabel="step", ylabel="mean reward, with 95% interval", title="evaluation over the checkpoints")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(str(path))


def _shown(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
