"""Writes docs/metrics.md from the catalogue: `python -m meshrl.core.metrics.document > docs/metrics.md`."""

from __future__ import annotations

import sys

from meshrl.core.metrics.names import SECTIONS

_HEAD = """# Metrics

Every metric that a record of a run may hold, made from `services/meshrl/core/metrics/names.py`. Records go to the
console, to `metrics.jsonl`, to Weights & Biases and, where `log.metrics_port` is set, to Prometheus: under the name in
the last column, with the words in braces as labels and the statistic as the label `statistic`.

`{scope}` is `all` or the name of an environment. A name with several statistics has one metric for each:
`reward/{scope}/mean`, `reward/{scope}/std` and so on.
"""


def document() -> str:
    parts = [_HEAD]
    for title, metrics in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| name | unit | meaning | filled by | at Prometheus |\n|---|---|---|---|---|\n")
        for metric in metrics:
            name = f"`{metric.name}`" + (f" ({', '.join(metric.statistics)})" if metric.statistics else "")
            owners = ", ".join(source.value for source in metric.filled_by)
            parts.append(f"| {name} | {metric.unit} | {metric.meaning} | {owners} | `{metric.exported}` |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
