"""The table that `--bench` ends with: means over the steps after the first, which warms up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ROWS: tuple[tuple[str, str], ...] = (
    ("time/step", "seconds a step"),
    ("time/wait_for_rollouts", "  of it waiting for rollouts"),
    ("time/wait_for_ckpt", "  of it waiting for the trainer"),
    ("time/train_step", "seconds a train step"),
    ("perf/rollouts_per_s", "rollouts a second"),
    ("perf/inference_tokens_per_s", "sampled tokens a second"),
    ("perf/throughput", "trained tokens a second"),
    ("weights/pause_s", "seconds of pause a version"),
    ("weights/lag_s", "seconds of lag a version"),
)


def summary_table(records: Sequence[Mapping[str, float]]) -> str:
    """Mean, least and most of each row; says so when there is no step to measure."""
    measured = records[1:]
    if not measured:
        return f"{len(records)} steps are too few to measure: run at least 2"
    lines = [f"{'over ' + str(len(measured)) + ' steps':<34}{'mean':>12}{'min':>12}{'max':>12}"]
    for name, label in ROWS:
        values = [metrics[name] for metrics in measured if name in metrics]
        if values:
            mean = sum(values) / len(values)
            lines.append(f"{label:<34}{mean:>12.4f}{min(values):>12.4f}{max(values):>12.4f}")
    return "\n".join(lines)
