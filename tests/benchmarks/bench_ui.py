"""How fast the page of `meshrl ui` is on a long run: 10,000 steps of 150 metrics, 1.3 million rollouts, 200,000 spans.

Makes the folder, serves it, asks for each route, and drives a headless Chromium: first paint of a page opened anew,
each view's time from the change of address to its last element, and a rollout of 32,768 tokens. Prints two tables;
needs Chromium on PATH. With --beside it looks at a run that goes on instead, on Linux: the CPU time that `meshrl ui`
takes with one page open, as a share of the time of the run's programs.

    python tests/benchmarks/bench_ui.py [--steps N] [--rollouts N] [--repeats N]
    python tests/benchmarks/bench_ui.py --beside RUN [--seconds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import zstandard
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

sys.path.append(str(Path(__file__).parents[1] / "support"))

from bench_workers import cpu_s
from browser import browser_tab
from made_run import add_ledger, add_span, make_run, rollout
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.ui.server import Page

VIEWS = {
    "overview": ("overview?n={step}", "document.querySelectorAll('.u-wrap').length >= 5"),
    "rollouts": ("rollouts?step={step}", "document.querySelectorAll('.message').length > 1"),
    "rollout of 32k tokens": (
        "rollouts?step=2&look=logprobs&n={step}", "document.querySelectorAll('.tokens .block i').length >= 256",
    ),
    "its gaps to the trainer": (
        "rollouts?step=2&look=gap&n={step}", "document.querySelectorAll('.tokens .block i').length >= 256",
    ),
    "timeline": ("timeline?n={step}", "document.querySelectorAll('rect.span').length > 1"),
    "weights": ("weights?n={step}", "document.querySelectorAll('.u-wrap').length >= 1"),
    "environments": ("environments?n={step}", "document.querySelectorAll('#view table').length == 2"),
    "compare": ("compare?n={step}", "document.querySelectorAll('.u-wrap').length == 1"),
}  # fmt: skip
NAMES = ("reward/all/mean", "time/step", "time/wait_for_rollouts", "perf/throughput", "mismatch_kl/all/mean",
         "off_policy/all/mean", "completion_len/all/mean", "weights/lag_s", "weights/pause_s")  # fmt: skip


def fill(folder: Path, steps: int, rollouts: int) -> None:
    """A run of many steps in the folder that make_run makes."""
    make_run(folder, steps=50)
    names = [*NAMES, *(f"metrics/made/{number}" for number in range(150 - len(NAMES)))]
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, **{name: round(draw.random(), 6) for name in names}}) + "\n")
    with zstandard.open(folder / "rollouts/step_2.jsonl.zst", "wt", encoding="utf-8") as lines:
        lines.write(json.dumps(rollout(2, "random", 0.5, "long", tokens=32768)) + "\n")
    for step in range(4, TRACED):
        add_span(folder, "orchestrator", "rl.step", 100.0 + 10.0 * step, 9.0, {"rl.step": step})
    with (folder / "traces/rollout_worker_1.jsonl.zst").open("wb") as file:
        for step in range(4, TRACED):
            for first in range(0, 4000, 200):
                spans = [rollout_span(100.0 + 10.0 * step + 0.001 * n, draw) for n in range(first, first + 200)]
                batch = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
                file.write(zstandard.compress(f"{batch}\n".encode()))
    add_ledger(
        folder,
        (
            (f"env_{n % 3}", "trained" if n % 7 else "dropped", "" if n % 7 else "zero_signal", 0.01 * n)
            for n in range(rollouts)
        ),
    )


WARM_UP_S = 15.0
TRACED = 54
"""Steps that have traces."""
ROUTES = (
    "runs", "runs/0/now", "runs/0/metrics", f"runs/0/metrics?names={','.join(NAMES)}",
    f"runs/0/metrics?along=time&names={','.join(NAMES)}", "runs/0/doctor", "differences?runs=0,0", "runs/0/rollouts",
    "runs/0/rollouts?step=2", "runs/0/timeline", "runs/0/versions", "runs/0/ledger",
)  # fmt: skip


def rollout_span(start_s: float, draw: random.Random) -> dict[str, object]:
    """A span as the rollout program writes it."""
    return {
        "name": "rl.rollout", "traceId": draw.randbytes(16).hex(), "spanId": draw.randbytes(8).hex(),
        "parentSpanId": "",
        "startTimeUnixNano": str(round(start_s * 1e9)), "endTimeUnixNano": str(round((start_s + 3.0) * 1e9)),
        "attributes": [{"key": "rl.environment", "value": {"stringValue": "made"}}],
    }  # fmt: skip


def row(name: str, times: Sequence[float]) -> str:
    """The first time, the median and the 95th percentile of the others, in ms."""
    rest = sorted(times[1:])
    p95 = rest[min(len(rest) - 1, int(0.95 * len(rest)))]
    return f"| {name} | {times[0]:.0f} | {statistics.median(rest):.0f} | {p95:.0f} |"


async def measure_routes(base: str, repeats: int) -> None:
    print("| route | first ms | median ms | p95 ms |\n|---|---|---|---|")
    async with ClientSession() as session:
        for route in ROUTES:
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                async with session.get(f"{base}api/{route}") as answer:
                    answer.raise_for_status()
                    await answer.read()
                times.append((time.perf_counter() - began) * 1e3)
            print(row(route.partition("names=")[0], times), flush=True)


async def measure(folder: Path, repeats: int) -> None:
    server = TestServer(Page([RunFolder(folder)]).application(hosts=None, token=None))
    await server.start_server()
    base = str(server.make_url("/"))
    await measure_routes(base, repeats)
    async with browser_tab() as tab:
        paints = []
        for number in range(repeats):
            await tab.open(f"{base}?again={number}#/0/overview")
            await tab.until("performance.getEntriesByName('first-contentful-paint').length == 1")
            paints.append(await tab.ask("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        print(f"first paint: {statistics.median(paints):.0f} ms median, {max(paints):.0f} ms at most")
        print("| view | first ms | median ms | p95 ms |\n|---|---|---|---|")
        for name, (view, ready) in VIEWS.items():
            times = []
            for number in range(repeats):
                await tab.ask("document.querySelector('#view').replaceChildren()")
                began = time.perf_counter()
                await tab.ask(f"location.hash = '/0/{view.format(step=number + 3)}'")
                await tab.until(ready)
                times.append((time.perf_counter() - began) * 1e3)
            print(row(name, times), flush=True)
        assert tab.errors == [], tab.errors
    await server.close()


def rl_of(run: Path) -> int:
    """The process that started the programs of a run."""
    orchestrator = json.loads((run / "state/orchestrator.json").read_text())["pid"]
    return int(Path(f"/proc/{orchestrator}/stat").read_text().rpartition(")")[2].split()[1])


async def beside(run: Path, seconds: float) -> None:
    """Prints the CPU time of `meshrl ui` beside that of a run, while a page is open on each of its views in turn."""
    command = [sys.executable, "-m", "meshrl.cli.main", "ui", str(run), "--port", "0"]
    ui = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert ui.stdout is not None
    rl = rl_of(run)
    address = (await ui.stdout.readline()).decode().split()[1]
    print("| view | s | ui, CPU s | run, CPU s | share |\n|---|---|---|---|---|")
    async with browser_tab() as tab:
        for view in ("overview", "timeline", "weights", "environments", "hosts"):
            await tab.open(f"{address}#/0/{view}")
            await asyncio.sleep(WARM_UP_S)
            before = sum(cpu_s(ui.pid)), sum(cpu_s(rl))
            await asyncio.sleep(seconds)
            spent, of_run = sum(cpu_s(ui.pid)) - before[0], sum(cpu_s(rl)) - before[1]
            assert of_run > 0.0, "the run has ended meanwhile: name one that goes on longer"
            print(f"| {view} | {seconds:.0f} | {spent:.2f} | {of_run:.1f} | {spent / of_run:.2%} |", flush=True)
    ui.terminate()
    await ui.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=1_300_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--beside", type=Path, metavar="RUN")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if options.beside is not None:
        asyncio.run(beside(options.beside, options.seconds))
        return
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "run", options.steps, options.rollouts)
        asyncio.run(measure(Path(folder) / "run", options.repeats))


if __name__ == "__main__":
    main()
