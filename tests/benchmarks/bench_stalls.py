"""Ten ways in which a run comes to a stop, and how soon log, `meshrl status` and the page say which it is.

    python tests/benchmarks/bench_stalls.py --model outputs/demo/sft/weights/final
    python tests/benchmarks/bench_stalls.py --model ... --only "NaN loss" "full disk"

Each is put into a run of its own: the demo's recipe with 32 rollouts a step, after a few steps. From then on the new
lines of all logs, what `meshrl status --json` prints and what the page fetches are held against the words that name the
culprit. "full disk" fills a file system of its own and wants to be root. Exits with the number of stalls that a reader
was not told of within 15 s.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stalling_run import StallingRun

SOON_S = 15.0
MOST_S = 60.0
BEGIN_S = 400.0
LOOK_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One way to stop a run; `named` is what a line must say to name it."""

    name: str
    inject: Callable[[StallingRun], object]
    named: str
    flags: tuple[str, ...] = ()
    by_hand: bool = False
    on_small_disk: bool = False
    steps: int = 4
    """Steps that must have ended before."""


STALLS = (
    Stall(name="engine stopped", inject=lambda run: run.stop("inference"), named="inference is stopped"),
    Stall(name="hub killed", inject=lambda run: run.kill("weights"), named=r"weights (died|is gone|was killed)"),
    Stall(name="blocking reward", inject=lambda run: run.mark("block"), named="bench_stalling.*(similar|block)"),
    Stall(
        name="hanging reward", inject=lambda run: run.mark("hang"), named="rollouts of 'bench_stalling' in its rewards"
    ),
    Stall(
        name="NaN loss", inject=lambda run: run.mark("nan"), named="loss nan",
        flags=("--trainer.loss.type", "custom", "--trainer.loss.import-path", "stalling_loss.loss"),
    ),
    Stall(
        name="full disk", inject=lambda run: run.fill_disk(), named="No space left on device|disk .* is full",
        on_small_disk=True,
    ),
    Stall(
        name="stuck loop", inject=lambda run: run.block_loop("rollout"),
        named="rollout answers nobody: its event loop is stuck|event loop of rollout",
    ),
    Stall(
        name="slow link", inject=lambda run: run.slow_down(), named=r"version \d+ from the hub, of which",
        flags=("--weights.transport", "stream"), by_hand=True,
    ),
    Stall(
        name="dead worker",
        inject=lambda run: run.kill("rollout_worker_1"), named="worker 1 .*SIGKILL|rollout_worker_1 is gone"
    ),
    Stall(
        name="no engine", inject=lambda run: None, named="wait(s|ing) for .*a first engine",
        flags=("--no-inference", "--orchestrator.client.base-url", "http://127.0.0.1:9/v1"), steps=0,
    ),
)  # fmt: skip


@dataclass
class Found:
    """Seconds until the stall was named, and in which words."""

    seconds: float | None = None
    words: str = ""

    def look(self, pattern: re.Pattern[str], lines: list[str], since_s: float) -> None:
        if self.seconds is None and (said := next((line for line in lines if pattern.search(line)), None)):
            self.seconds, self.words = time.monotonic() - since_s, said.strip()

    def __str__(self) -> str:
        return "never" if self.seconds is None else f"{self.seconds:.1f} s"


def play(stall: Stall, model: Path, folder: Path, *, verbose: bool) -> dict[str, Found]:
    """Brings the stall about; returns how it was named in log, CLI and page, each looked at as often as it can be."""
    pattern = re.compile(stall.named)
    with StallingRun(model, folder, flags=stall.flags, by_hand=stall.by_hand, small_disk=stall.on_small_disk) as run:
        run.wait_for_steps(stall.steps, BEGIN_S)
        run.new_log_lines()
        looks: dict[str, Callable[[], list[str]]] = {
            "log": run.new_log_lines,
            "CLI": lambda: said(run.cli()),
            "page": lambda: said(run.page()),
        }
        began_s = time.monotonic()
        stall.inject(run)

        def watch(look: Callable[[], list[str]]) -> Found:
            found = Found()
            while time.monotonic() - began_s < MOST_S and found.seconds is None:
                lines = look()
                found.look(pattern, lines, began_s)
                if verbose:
                    print(f"{time.monotonic() - began_s:5.1f} s", *lines, sep="\n    ", flush=True)
                time.sleep(LOOK_S)
            return found

        with ThreadPoolExecutor(len(looks)) as watching:
            return dict(zip(looks, watching.map(watch, looks.values()), strict=True))


def said(status: dict[str, object]) -> list[str]:
    """What a person reads of a status: its sentence, and each service."""
    rows = status.get("rows", [])
    assert isinstance(rows, list), "it is in the schema"
    return [
        f"{status['waiting'] or status['ended_by']}",
        f"{status['headline']}",
        *(f"{row['service']} {row['state']}: {row['detail']}" for row in rows),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what the runs begin with: the demo's warm-up")
    parser.add_argument("--only", nargs="*", default=[], help="names of stalls")
    parser.add_argument("--verbose", action="store_true", help="print all that was said")
    given = parser.parse_args()
    chosen = [stall for stall in STALLS if not given.only or stall.name in given.only]
    late = 0
    table = []
    for stall in chosen:
        print(f"{stall.name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="stalls-") as folder:
            found = play(stall, given.model.resolve(), Path(folder), verbose=given.verbose)
        late += any(one.seconds is None or one.seconds > SOON_S for one in found.values())
        words = found["page"].words or found["log"].words
        table.append(f"| {stall.name} | {found['log']} | {found['CLI']} | {found['page']} | {words} |")
        print(table[-1], file=sys.stderr, flush=True)
    print("| stall | log | CLI | page | what it says |\n|---|---|---|---|---|", *table, sep="\n")
    return late


if __name__ == "__main__":
    sys.exit(main())
