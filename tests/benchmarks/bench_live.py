"""How soon the page of `meshrl ui` shows a step of a run that goes on, and pictures of every view of that run.

    python tests/benchmarks/bench_live.py --model outputs/demo/sft/weights/final [--steps 10] [--pictures FOLDER]

Runs the demo's recipe with 32 rollouts a step. The delay is from the moment that metrics.jsonl has a step's record to
the moment that the sentence of the view Now says so, in headless Chromium. Needs Chromium on PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from stalling_run import StallingRun

from browser import browser_tab

VIEWS = {
    "now": ("now", "document.querySelectorAll('.u-wrap').length >= 3 && document.querySelectorAll('tbody tr').length"),
    "rollouts": ("rollouts", "document.querySelectorAll('.message').length > 1"),
    "tokens": ("rollouts?look=logprobs", "document.querySelectorAll('.tokens .block i').length > 1"),
    "timeline": ("timeline", "document.querySelectorAll('rect.span').length > 1"),
    "weights": ("weights", "document.querySelectorAll('.u-wrap').length >= 1"),
    "ledger": ("ledger", "document.querySelectorAll('table').length >= 1"),
    "compare": ("compare", "document.querySelectorAll('.u-wrap').length == 1"),
}
FIRST_STEP, BEGIN_S, STEP_S = 4, 400.0, 120.0


async def measure(run: StallingRun, steps: int, pictures: Path | None) -> list[float]:
    """Seconds until each step was seen."""
    delays = []
    async with browser_tab() as tab:
        await tab.open(f"{run.page_url}#/0/now")
        await tab.until("document.querySelectorAll('.u-wrap').length >= 3")
        for _ in range(steps):
            before, end_s = run.steps_ended(), time.monotonic() + STEP_S
            while (step := run.steps_ended()) == before:
                assert time.monotonic() < end_s, "no step ends"
                await asyncio.sleep(0.01)
            began_s = time.monotonic()
            said = "Number(/step (\\d+)/.exec(document.querySelector('.sentence')?.textContent)?.[1])"
            await tab.until(f"{said} >= {step}")
            delays.append(time.monotonic() - began_s)
        for name, (view, ready) in VIEWS.items():
            await tab.ask("document.querySelector('#view').replaceChildren()")
            await tab.ask(f"location.hash = '/0/{view}'")
            await tab.until(ready)
            if pictures is not None:
                await asyncio.sleep(1.0)  # charts find their width
                await tab.picture(pictures / f"live_{name}.png")
        assert tab.errors == [], tab.errors
    return delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="live-") as folder,
        StallingRun(given.model.resolve(), Path(folder), flags=(), by_hand=False, small_disk=False) as run,
    ):
        run.wait_for_steps(FIRST_STEP, BEGIN_S)
        delays = sorted(asyncio.run(measure(run, given.steps, given.pictures)))
    print(f"{len(delays)} steps: seen after {statistics.median(delays):.2f} s (median), {delays[-1]:.2f} s at most")


if __name__ == "__main__":
    main()
