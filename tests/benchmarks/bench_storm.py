"""A storm over a run on reverse_text in steady operation: programs are killed (-9) or stopped for a while, one after
the other; each stall is held against what its victim itself needed to come back, and the ledger must add up.

Usage: bench_storm.py [--kills N] [--stops N] [--transport filesystem|nccl|stream|auto] [--victims NAME ...] [--seed N]
                      [--stop-s FROM TO] [--model FOLDER] [--output-dir FOLDER] [--report FILE] [--deadline-s S]
                      [--batch-size N] [-- FLAG ...]     flags after -- are for rl

A fault is drawn when its victim has been up for at least two steps. Its stall is the longest time without a completed
step from then on, less the usual time of a step; its own restart is the time from the kill until its health says that
it serves, or the length of the stop. Prints a line a fault, then the audit of the ledger; exits with 1 when a stall
exceeds the victim's own restart by more than 15 s, the run fails, or the ledger is not exact. Ends by itself: every
wait has an end. Ports are free ones and everything is under output_dir, so that several may run side by side; --model
then spares each its own warm-up. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from meshrl.launch import demo
from meshrl.launch.demo_report import EDGE_STEPS, curves, read_records
from storm_run import Run, StormError

AUDIT = Path(__file__).parents[1] / "support" / "ledger_audit.py"
PROGRAMS = ("weights", "inference", "trainer", "rollout", "orchestrator")
FIRST_STEPS = 5  # before the first fault: they also say how long a step takes
STEPS_UP = 2
BEYOND_RESTART_S = 15.0
START_S = 600.0
READY_S = 420.0  # for a victim to come back
STEPS_S = 420.0  # for steps to be completed once it has


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happened to one victim, and to the run by it. Times in seconds."""

    number: int
    kind: str
    victim: str
    at_step: int
    at_s: float
    own_s: float
    """From the kill until the victim's health says that it serves, or the length of the stop."""
    stall_s: float
    also_restarted: tuple[str, ...]

    @property
    def excess_s(self) -> float:
        return self.stall_s - self.own_s

    def line(self) -> str:
        also = f"  also restarted: {', '.join(self.also_restarted)}" if self.also_restarted else ""
        return (
            f"{self.number:4d}  {self.kind:<4}  {self.victim:<12}  at step {self.at_step:5d}  "
            f"own {self.own_s:6.1f} s  stall {self.stall_s:6.1f} s  excess {self.excess_s:+6.1f} s{also}"
        )


class Storm:
    """Draws the faults and measures them, one at a time."""

    def __init__(self, run: Run, source: random.Random, stop_s: tuple[float, float]) -> None:
        self._run = run
        self._source = source
        self._stop_s = stop_s
        self.faults: list[Fault] = []
        self._starts: Counter[str] = Counter()  # when the last fault was over

    def begin(self) -> None:
        self._run.wait(lambda: self._run.steps.newest >= FIRST_STEPS, START_S, f"step {FIRST_STEPS}")
        self.began_s = time.monotonic()
        self._starts = self._run.starts()

    def settle(self) -> None:
        """Returns once every program is up, one that was started since the last fault for at least two steps."""
        while True:
            for name in PROGRAMS:
                self._run.wait(lambda name=name: self._run.is_ready(name), READY_S, f"health of {name}")
            if self._run.starts() == self._starts:
                return
            self._starts, up_s = self._run.starts(), time.monotonic()
            self._run.wait(lambda up_s=up_s: self._run.steps.since(up_s) >= STEPS_UP, STEPS_S, f"{STEPS_UP} steps")

    def strike(self, kind: str, victim: str) -> Fault:
        """One fault, up to two steps after the victim is back. Raises StormError when it does not come back."""
        run = self._run
        self.settle()
        time.sleep(self._source.uniform(0.0, 1.5 * self._run.steps.usual_s()))  # anywhere in a step
        pid, starts, usual_step_s = run.pid(victim), run.starts(), self._run.steps.usual_s()
        at_s, at_step = time.monotonic(), run.steps.newest
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
            run.wait(lambda: run.starts()[victim] > starts[victim], READY_S, f"new process of {victim}")
            run.wait(lambda: run.is_ready(victim), READY_S, f"health of {victim} after its kill")
            back_s = time.monotonic()
        else:
            os.killpg(pid, signal.SIGSTOP)  # each program leads a group, with its children
            try:
                time.sleep(self._source.uniform(*self._stop_s))
            finally:
                with suppress(ProcessLookupError):  # it died of the stop: the report names it among the restarted
                    os.killpg(pid, signal.SIGCONT)
            back_s = time.monotonic()
        run.wait(lambda: run.steps.since(back_s) >= STEPS_UP, STEPS_S, f"{STEPS_UP} steps after {kind} of {victim}")
        others = run.starts() - starts
        others[victim] -= kind == "kill"
        fault = Fault(
            number=len(self.faults) + 1,
            kind=kind,
            victim=victim,
            at_step=at_step,
            at_s=at_s - self.began_s,
            own_s=back_s - at_s,
            stall_s=max(0.0, run.steps.longest_gap_s(at_s) - usual_step_s),
            also_restarted=tuple(sorted((+others).elements())),
        )
        self.faults.append(fault)
        if not fault.also_restarted:  # the victim itself has been up for two steps
            self._starts = run.starts()
        return fault


def draw(kills: int, stops: int, victims: list[str], source: random.Random) -> list[tuple[str, str]]:
    """(kind, victim) of each fault: every victim about as often, in random order."""
    chosen = []
    for kind, count in (("kill", kills), ("stop", stops)):
        order = source.sample(victims, len(victims))
        chosen += [(kind, order[number % len(order)]) for number in range(count)]
    source.shuffle(chosen)
    return chosen


def report(
    storm: Storm, run: Run, *, code: int, failure: str, planned: int, about: dict[str, object]
) -> dict[str, object]:
    """What came out, as it is written to --report."""
    path = run.output_dir / "metrics.jsonl"
    rewards = [reward for _, reward in curves(read_records(path)).train] if path.exists() else []
    audit = subprocess.run(
        [sys.executable, str(AUDIT), str(run.output_dir)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    worst = max(storm.faults, key=lambda fault: fault.excess_s, default=None)
    edge = min(EDGE_STEPS, len(rewards))
    return {
        **about,
        "ok": code == 0
        and not failure
        and audit.returncode == 0
        and len(storm.faults) == planned
        and (worst is None or worst.excess_s <= BEYOND_RESTART_S),
        "failure": failure,
        "exit_code": code,
        "audit_exact": audit.returncode == 0,
        "audit": audit.stdout + audit.stderr,
        "steps": run.steps.newest,
        "usual_step_s": run.steps.usual_s() if len(run.steps.times()) > 1 else None,
        "reward_first": round(sum(rewards[:edge]) / edge, 3) if edge else None,
        "reward_last": round(sum(rewards[-edge:]) / edge, 3) if edge else None,
        "planned": planned,
        "worst_excess_s": worst.excess_s if worst is not None else None,
        "faults": [asdict(fault) | {"excess_s": fault.excess_s} for fault in storm.faults],
    }


def show(result: dict[str, object], storm: Storm) -> None:
    print(result["audit"])
    worst = max(storm.faults, key=lambda fault: fault.excess_s, default=None)
    if worst is not None:
        print(f"largest stall beyond the victim's own restart: {worst.line().strip()}")
    for victim in PROGRAMS:
        excesses_s = [fault.excess_s for fault in storm.faults if fault.victim == victim]
        if excesses_s:
            print(f"  {victim:<12} {len(excesses_s):3d} faults, largest excess {max(excesses_s):+.1f} s")
    print(f"training reward {result['reward_first']} -> {result['reward_last']}")
    count = f"{len(storm.faults)} of {result['planned']} faults over {result['steps']} steps"
    print(f"{count}; exit code {result['exit_code']}")
    if result["failure"]:
        print(f"failed: {result['failure']}")
    print("held" if result["ok"] else "NOT held", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill and stop a run's programs in steady operation.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--transport", choices=("auto", "filesystem", "nccl", "stream"), default="filesystem")
    parser.add_argument("--victims", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--stop-s", type=float, nargs=2, default=[5.0, 40.0], help="length of a stop, from and to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=64, help="rollouts a step")
    parser.add_argument("--deadline-s", type=float, default=7200.0, help="after this no more faults are drawn")
    parser.add_argument("--model", type=Path, help="where the run starts, such as outputs/demo/sft/weights/final")
    parser.add_argument("--output-dir", type=Path, help="keep the run here")
    parser.add_argument("--report", type=Path, help="write what came out here, as JSON")
    parser.add_argument("flags", nargs="*", help="after --: flags for rl")
    return parser.parse_args()


def warm_up(folder: Path) -> Path:
    """The demo's own model and warm-up."""
    prepare, sft, _ = demo.stages(demo.parse(["--output-dir", str(folder)]))
    for stage in (prepare, sft):
        demo.run(stage, lambda line: None)
    return folder / "sft" / "weights" / "final"


def storm_over(read: argparse.Namespace, model: Path, output_dir: Path) -> bool:
    source = random.Random(read.seed)
    chosen = draw(read.kills, read.stops, read.victims, source)
    flags = ["--orchestrator.batch-size", str(read.batch_size), "--orchestrator.eval.interval", "20"]
    flags += ["--orchestrator.eval.num-examples", "32", *read.flags]
    run = Run(model, output_dir, transport=read.transport, restarts=2 * read.kills + 8, flags=flags)
    storm = Storm(run, source, (read.stop_s[0], read.stop_s[1]))
    failure = ""
    try:
        storm.begin()
        print(f"steady at step {run.steps.newest}, a step takes {run.steps.usual_s():.1f} s", flush=True)
        for kind, victim in chosen:
            if time.monotonic() - storm.began_s > read.deadline_s:
                raise StormError(f"{len(storm.faults)} faults took {read.deadline_s:g} s (--deadline-s)")
            print(storm.strike(kind, victim).line(), flush=True)
    except (StormError, OSError) as error:  # told in the report, after the run has ended
        failure = str(error)
        print(f"{failure}\n{run.tail()}", flush=True)
    finally:
        code = run.end()
    about = {"transport": read.transport, "seed": read.seed, "batch_size": read.batch_size}
    result = report(storm, run, code=code, failure=failure, planned=len(chosen), about=about)
    show(result, storm)
    if read.report is not None:
        read.report.parent.mkdir(parents=True, exist_ok=True)
        read.report.write_text(json.dumps(result, indent=1))
    return bool(result["ok"])


def main() -> None:
    read = arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = (read.model or warm_up(Path(folder) / "warm_up")).resolve()
        held = storm_over(read, model, (read.output_dir or Path(folder) / "run").resolve())
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
