"""Writes docs/metrics.md from the catalogue: `python -m meshrl.core.metrics.document > docs/metrics.md`."""

from __future__ import annotations

import sys

from meshrl.core.metrics.catalogue import Metric
from meshrl.core.metrics.names import SECTIONS

_HEAD = """# Metrics

Every metric that a record of a run may hold, made from `services/meshrl/core/metrics/names.py`. Records go to the
console, to `metrics.jsonl`, to Weights & Biases and, where `log.metrics_port` is set, to Prometheus: there the name
begins with `meshrl_` and has `_` for `/`, and what is in braces is a label instead, like the statistic (`statistic`).
`eval/{environment}/avg@{k}` is `meshrl_eval_avg` with the labels `environment` and `k`.

`{scope}` is `all` or the name of an environment. A name with several statistics has one metric for each:
`reward/{scope}/mean`, `reward/{scope}/std` and so on.
"""


def document() -> str:
    parts = [_HEAD]
    for title, metrics in SECTIONS.items():
        fillers = {_fillers(metric) for metric in metrics}
        columns = ["name", "unit", "meaning", *(["filled by"] if len(fillers) > 1 else [])]
        above = f"Filled by {fillers.pop()}:\n\n" if len(fillers) == 1 else ""
        parts.append(f"\n## {title}\n\n{above}| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
        for metric in metrics:
            name = f"`{metric.name}`" + (f" ({', '.join(metric.statistics)})" if metric.statistics else "")
            cells = (name, metric.unit, metric.meaning, _fillers(metric))
            parts.append(f"| {' | '.join(cells[: len(columns)])} |\n")
    return "".join(parts)


def _fillers(metric: Metric) -> str:
    return ", ".join(source.value for source in metric.filled_by)


if __name__ == "__main__":
    sys.stdout.write(document())
