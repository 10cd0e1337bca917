"""A long run of short steps, in which nothing may grow: memory, open files and threads of the five programs, disk a
step and the hub's cost a step.

Usage: bench_soak.py [--steps 2000] [--after 200] [--every SECONDS] [--model FOLDER] [--output-dir FOLDER]
                     [--report FILE] [-- flags for rl]
It runs `rl` on the demo's model with short rollouts, looks at the programs every few seconds, and prints a table. A
figure's growth is that of a robust line through its values after step `--after`. Exits with 1 when a figure is not
flat, when a total in metrics.jsonl does not agree with the ledger, or when the run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from meshrl.core.paths import Layout
from meshrl.launch import demo
from meshrl.wire.growing_file import GrowingFile
from meshrl.wire.text_table import markdown_row, markdown_table
from soak_figures import PROGRAMS, Process, Rule, Sample, Verdict, as_json, disk_parts, judge, look_at

AUDIT = Path(__file__).parents[1] / "support" / "ledger_audit.py"
READY_S = 240.0
STALL_S = 600.0
END_S = 120.0
SHORT_STEPS = (
    "--orchestrator.batch-size", "8", "--orchestrator.group-size", "4", "--orchestrator.sampling.max-tokens", "6",
    "--orchestrator.eval.interval", "50", "--orchestrator.eval.num-examples", "8",
    "--orchestrator.eval.sampling.max-tokens", "6", "--trainer.optim.lr", "1e-6",
    "--ckpt.interval", "50", "--ckpt.keep-last", "2", "--log.traces-max-mib", "8", "--trainer.history-events", "300",
    "--no-orchestrator.filters.zero-signal",
)  # fmt: skip
"""Well below a second a step, with evaluations and checkpoints in between; the model stays as it is, and groups without
signal count, so that the last step has as much to do as the first. What is kept up to a bound reaches it early."""

MEMORY_KB_A_STEP = 1.0
FILES_A_STEP = 0.005
"""One in 200 steps: a leak is one a step or one a checkpoint; the count also moves with the connections in use."""
TOTALS_MORE = 1.35
"""The later half of the steps may cost this much more than the half before it."""
TRACES_MOST_BYTES = 5 * 8 * 1024**2

RULES = (
    *(
        Rule(figure=f"{name} {figure}", kind="level", bound=bound)
        for figure, bound in (
            ("own_kb", MEMORY_KB_A_STEP),
            ("mapped_kb", MEMORY_KB_A_STEP),
            ("files", FILES_A_STEP),
            ("threads", FILES_A_STEP),
        )
        for name in PROGRAMS
    ),
    *(Rule(figure=f"{name} cpu_s", kind="total", bound=TOTALS_MORE) for name in PROGRAMS),
    *(Rule(figure=f"disk {part}", kind="total", bound=TOTALS_MORE) for part in ("ledger", "logs", "metrics", "all")),
    *(Rule(figure=f"disk {part}", kind="level", bound=64.0) for part in ("weight_hub", "weights", "checkpoints")),
    Rule(figure="disk traces", kind="bounded", bound=TRACES_MOST_BYTES),
)


class Soak:
    """One `rl` process and what was seen of it."""

    def __init__(self, model: Path, output_dir: Path, *, steps: int, flags: Sequence[str]) -> None:
        self.layout = Layout(output_dir)
        self.console = output_dir.with_suffix(".console")
        self.samples: list[Sample] = []
        self._step, self._metrics = 0, GrowingFile(self.layout.metrics_jsonl)
        own = ["--model.name", model, "--max-steps", steps, "--output-dir", output_dir, *SHORT_STEPS, *flags]
        command = [sys.executable, "-m", "meshrl.launch.main", "@", "configs/reverse_text/rl.toml", *map(str, own)]
        with self.console.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self._started = time.monotonic()

    def step(self) -> int:
        """The last step with a record; reads what was added to metrics.jsonl since."""
        for line in self._metrics.read_on():
            if "time/step" in (record := json.loads(line)):
                self._step = int(record["step"])
        return self._step

    def pids(self) -> dict[str, int]:
        """Of each program's latest process, as `rl` names them in its log."""
        log = self.layout.log("rl")
        text = log.read_text(errors="replace") if log.exists() else ""
        found = {name: re.findall(rf"started {name}(?:_0)? \(pid (\d+)\)", text) for name in PROGRAMS}
        return {name: int(pids[-1]) for name, pids in found.items() if pids}

    def look(self) -> None:
        """Adds a sample."""
        step = self.step()
        seen: dict[str, Process] = {}
        for name, pid in self.pids().items():
            if (process := look_at(pid)) is not None:
                seen[name] = process
        disk = disk_parts(self.layout.output_dir) if self.layout.output_dir.is_dir() else {}
        self.samples.append(Sample(step=step, at_s=time.monotonic() - self._started, processes=seen, disk=disk))

    def watch(self, every_s: float, at_most_s: float | None) -> int:
        """Looks until the run ends; returns its exit code, 124 when it took too long or made no step for too long."""
        last, since = 0, time.monotonic()
        while (code := self.process.poll()) is None:
            self.look()
            if at_most_s is not None and time.monotonic() - self._started > at_most_s:
                return 124
            if (step := self._step) > last:
                if step // 100 > last // 100:
                    print(f"step {step} after {self.samples[-1].at_s:.0f} s", flush=True)
                last, since = step, time.monotonic()
            if time.monotonic() - since > (STALL_S if last else READY_S):
                print(f"no step after {last}:\n{self.tail()}")
                return 124
            time.sleep(every_s)
        return code

    def end(self) -> None:
        """Ends the run if it is still there."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=END_S)

    def tail(self) -> str:
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-25:])


def table(verdicts: Sequence[Verdict], shown: Sequence[int]) -> str:
    """One line a figure: its values at some steps, its growth, and the verdict."""
    head = ["figure", *(f"step {step}" for step in shown), "growth a step", "scatter", "measured", "bound", "flat"]
    lines = [markdown_table([head])]
    for verdict in verdicts:
        values = [f"{verdict.values[step]:,.6g}" for step in shown]
        cells = [
            verdict.rule.figure,
            *values,
            f"{verdict.a_step:+.4g}",
            f"{verdict.scatter:.4g}",
            f"{verdict.measured:.4g}",
        ]
        cells += [f"{verdict.rule.bound:g}", "yes" if verdict.flat else "NO"]
        lines.append(markdown_row(cells))
    return "\n".join(lines)


def demo_model(folder: Path) -> Path:
    """The demo's model before its warm-up: what the steps cost does not depend on what it has learned."""
    prepare, *_ = demo.stages(demo.parse(["--output-dir", str(folder)]))
    demo.run(prepare, lambda line: None)
    return folder / "model"


def shown_steps(steps: int, after: int) -> list[int]:
    """200, 500, 1000, 1500 and 2000 of a full soak; the same shares of a shorter one."""
    return [after, *(int(after + (steps - after) * share) for share in (1 / 6, 4 / 9, 13 / 18, 1))]


def soak(read: argparse.Namespace, folder: Path) -> int:
    """Runs, prints, writes the report; returns the exit code."""
    model = (read.model or demo_model(folder / "made")).resolve()
    run = Soak(model, (read.output_dir or folder / "run").resolve(), steps=read.steps, flags=read.flags)
    try:
        code = run.watch(read.every, read.at_most)
    finally:
        run.end()
    shown = shown_steps(min(read.steps, max(run.step(), read.after)), read.after)
    settled = [sample for sample in run.samples if 1 <= sample.step < read.steps]  # with the last step programs end
    judged = [judge(rule, settled, after=read.after, shown=shown) for rule in RULES]
    verdicts = [verdict for verdict in judged if verdict is not None]
    print(table(verdicts, shown))
    if read.report is not None:
        read.report.write_text(json.dumps(as_json(verdicts, settled), indent=1))
    audit = subprocess.run([sys.executable, str(AUDIT), str(run.layout.output_dir)], check=False).returncode
    grown = [verdict.rule.figure for verdict in verdicts if not verdict.flat]
    missing = len(RULES) - len(verdicts)
    if code:
        print(run.tail())
    print(
        f"exit code {code}; step {run.step()} of {read.steps}; audit {'exact' if audit == 0 else 'FAILED'};"
        f" {missing} figures without enough samples; not flat: {', '.join(grown) or 'none'}"
    )
    return int(bool(code or audit or grown or missing or run.step() < read.steps))


def main() -> None:
    parser = argparse.ArgumentParser(description="Show that nothing grows over a long run.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--after", type=int, default=200, help="the step from which nothing may grow (default 200)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two looks (default 3)")
    parser.add_argument("--at-most", type=float, metavar="SECONDS", help="end the run then, and judge what there is")
    parser.add_argument("--model", type=Path, help="where the run starts (default: the demo's model, made first)")
    parser.add_argument("--output-dir", type=Path, help="keep the run here")
    parser.add_argument("--report", type=Path, help="write verdicts and samples to this file as JSON")
    parser.add_argument("flags", nargs="*", help="after --: more flags for rl")
    read = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(soak(read, Path(folder)))


if __name__ == "__main__":
    main()
